"""A character transformer of about 0.8 million parameters.

The plain decoder of "Attention is all you need" in its present form: normalisation before each
block, rotary positions (Su et al. 2021), query-key normalisation (Henry et al. 2020), and one
matrix for input embedding and output projection (Press and Wolf 2017).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    vocabulary: int
    width: int = 128
    layers: int = 4
    heads: int = 4
    length: int = 128  # the longest sequence


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.head = config.width // config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3 * self.heads, self.head).transpose(1, 2)
        qk, v = qkv[:, : 2 * self.heads], qkv[:, 2 * self.heads :]
        q, k = rotate(F.layer_norm(qk, (self.head,)), cos, sin).chunk(2, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair (x[i], x[i + half]) by its position's angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.width
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.down(F.relu(self.up(self.mlp_norm(x))).square())


class CharTransformer(nn.Module):
    """Maps character numbers (batch, length) to logits (batch, length, vocabulary)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.width % config.heads or (config.width // config.heads) % 2:
            raise ValueError(
                f"width {config.width} needs {config.heads} heads of an even size, "
                f"not {config.width / config.heads:g}"
            )
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        half = config.width // config.heads // 2
        frequencies = 1000.0 ** -(torch.arange(half) / half)
        angles = torch.arange(config.length)[:, None] * frequencies
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        # What writes into the residual stream starts at zero, so that each block starts as the
        # identity and the learning rate can be high from the first steps.
        width = self.config.width
        nn.init.normal_(self.embedding.weight, std=0.02)
        for name, parameter in self.named_parameters():
            if name.endswith((".out.weight", ".down.weight")):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2 and not name.startswith("embedding"):
                nn.init.normal_(parameter, std=width**-0.5)

    def forward(self, characters: Tensor) -> Tensor:
        length = characters.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        # Scaled up: the tied matrix is small so that the first logits are.
        x = self.embedding(characters) * self.config.width**0.5
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.linear(self.norm(x), self.embedding.weight)

    @torch.no_grad()
    def sample(self, prompt: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """`prompt` (length,) followed by `count` characters drawn at temperature 0.8."""
        text = prompt
        for _ in range(count):
            logits = self(text[None, -self.config.length :])[0, -1]
            probabilities = (logits.float() / 0.8).softmax(-1)
            text = torch.cat((text, torch.multinomial(probabilities, 1, generator=generator)))
        return text
