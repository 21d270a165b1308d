"""The demo trains the same model on any number of ranks, over any backend."""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from pool import torch_ranks  # noqa: E402
from pycoll.demo.report import PROMPT, Yardsticks, plot, sample, summary  # noqa: E402
from pycoll.demo.text import (  # noqa: E402
    Sampler,
    load_corpus,
    make_corpus,
    python_reference,
    trigram_cross_entropy,
    trigram_entropy,
)
from pycoll.demo.train import TrainConfig, run  # noqa: E402

BACKENDS = ["gloo", "pycoll"]


@pytest.fixture(autouse=True)
def one_thread():
    """On small matrices, on a busy machine, threads spend their time waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


SMALL = TrainConfig(
    steps=20,
    batch=12,
    length=32,
    width=32,
    layers=2,
    heads=2,
    warmup=5,
    dtype="float64",
    validate_every=10,
)


@functools.cache
def text():
    """A part of the real text: real batches, and a validation that takes no time."""
    return make_corpus(python_reference()[:30_000])


def losses(rank, world_size, config):
    history, model = run(config, text())
    return history, [p.detach().numpy().tobytes() for p in model.parameters()]


@functools.cache
def run_alone():
    return run(SMALL, text())[0]


@pytest.fixture
def alone():
    return run_alone()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_loss_curve_does_not_depend_on_the_number_of_ranks(backend, ranks, alone):
    results = [r.value for r in torch_ranks(ranks, losses, SMALL, backend=backend, timeout=60)]
    history = results[0][0]
    assert len(history.train) == 20
    assert history.train == pytest.approx(alone.train, abs=1e-9, rel=0)
    assert [step for step, _ in history.validation] == [10, 20]
    for (_, ours), (_, theirs) in zip(history.validation, alone.validation, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-9, rel=0)
    # It learns, so the equality is not one of constants.
    assert history.train[-1] < history.train[0] - 0.5
    assert (history.backend, history.ranks) == (backend, ranks)
    for other, parameters in results[1:]:
        assert other.train == history.train
        assert parameters == results[0][1], "the ranks' models differ"
    if ranks > 1:
        assert 0 < history.communication < history.seconds


def test_a_different_batch_gives_a_different_curve(alone):
    # The tolerance of the test above would see it if ranks took the wrong rows.
    other = run(replace(SMALL, seed=2), text())[0]
    assert max(abs(a - b) for a, b in zip(other.train, alone.train, strict=True)) > 1e-3


@pytest.mark.parametrize("ranks", [1, 2])
def test_resuming_continues_exactly(ranks, tmp_path):
    config = replace(SMALL, dtype="float32", checkpoint=tmp_path / "c.pt")
    whole = torch_ranks(ranks, losses, replace(config, checkpoint=None), backend="gloo")[0].value
    torch_ranks(ranks, losses, replace(config, stop_after=10), backend="gloo")
    resumed = torch_ranks(ranks, losses, replace(config, resume=True), backend="gloo")[0].value
    assert resumed[0].train == whole[0].train
    assert resumed[0].validation == whole[0].validation
    assert resumed[1] == whole[1]
    assert [file.name for file in tmp_path.iterdir()] == ["c.pt"]


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    config = replace(SMALL, checkpoint=tmp_path / "c.pt", stop_after=1)
    run(config)
    with pytest.raises(ValueError, match="batch was 12, is 24; seed was 1, is 7"):
        run(replace(config, batch=24, seed=7, resume=True), text())
    with pytest.raises(FileNotFoundError, match="no checkpoint at .*other"):
        run(replace(config, checkpoint=tmp_path / "other.pt", resume=True), text())


def test_an_interrupted_save_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    from pycoll.demo import checkpoint

    path = tmp_path / "c.pt"
    checkpoint.save(path, {"step": 1})

    def half(state, file):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(path, {"step": 2})
    assert checkpoint.load(path) == {"step": 1}


def unequal(rank, world_size):
    with pytest.raises(ValueError, match="12 sequences cannot be shared equally by 5 ranks"):
        run(SMALL, text())


def test_a_batch_that_cannot_be_shared_is_refused():
    torch_ranks(5, unequal, backend="gloo", timeout=60)


def test_training_stops_at_the_target_and_at_the_time_limit():
    assert run(replace(SMALL, until=3.9), text())[0].reached
    history = run(replace(SMALL, until=0.1, time_limit=0.0, report_every=5), text())[0]
    assert not history.reached
    assert len(history.train) == 5


def test_ranks_share_the_global_batch_of_every_step():
    sampler = Sampler(torch.arange(1000), batch=12, length=16, seed=3)
    seen = []
    for step in range(6):
        whole = sampler.rows(step)
        assert whole.shape == (12, 17)
        assert (whole[:, 1:] - whole[:, :-1] == 1).all()
        for ranks in (1, 2, 3, 4, 6, 12):
            parts = [sampler.rows(step, rank, ranks) for rank in range(ranks)]
            assert torch.equal(torch.cat(parts), whole)
        seen += whole[:, 0].tolist()
    windows = (1000 - 17) // 16
    assert len(set(seen[:windows])) == windows, "an epoch visits each window once"
    assert not torch.equal(sampler.rows(0), replace(sampler, seed=4).rows(0))


def test_trigram_entropy_is_the_conditional_entropy():
    # "abacabad": the pair "ab" is followed by "a" twice; "ba" by "c" and "d"; all others once.
    corpus = make_corpus("abacabad")
    numbers = corpus.encode("abacabad")
    assert trigram_entropy(numbers) == pytest.approx(2 / 6 * math.log(2))
    assert trigram_entropy(corpus.encode("aaaaaa")) == 0
    # The chain rule on random text: H(3) - H(2), with pairs counted where a third follows.
    random = torch.randint(5, (400,), generator=torch.Generator().manual_seed(1))
    windows = random.unfold(0, 3, 1)

    def entropy(rows):
        _, counts = torch.unique(rows, dim=0, return_counts=True)
        p = counts.double() / counts.sum()
        return -(p * p.log()).sum().item()

    expected = entropy(windows) - entropy(windows[:, :2])
    assert trigram_entropy(random) == pytest.approx(expected, abs=1e-12)


def test_the_trigram_model_is_a_distribution():
    corpus = make_corpus("the cat sat on the mat. " * 20)
    size = len(corpus.vocabulary)
    total = 0.0
    for c in range(size):
        triple = torch.cat((corpus.encode("th"), torch.tensor([c])))
        total += math.exp(-trigram_cross_entropy(corpus.train, triple, size))
    assert total == pytest.approx(1)
    fitted = trigram_cross_entropy(corpus.train, corpus.validation, size)
    assert trigram_entropy(corpus.validation) < fitted < math.log(size)


def test_the_text_is_split_without_repeated_paragraphs():
    corpus = load_corpus()
    train, validation = (corpus.decode(t) for t in (corpus.train, corpus.validation))
    shared = set(train.split("\n\n")) & set(validation.split("\n\n")[1:])
    assert not shared
    assert 0.09 < len(validation) / len(train + validation) < 0.11


def test_the_report_shows_the_run(tmp_path, alone):
    corpus = text()
    yardsticks = Yardsticks.of(corpus)
    assert yardsticks.entropy < yardsticks.fitted < yardsticks.uniform
    table = summary(alone, yardsticks, target=1.25, total_seconds=12.0)
    assert f"{alone.validation[-1][1]:.4f}" in table
    assert "1.2500  NOT reached" in table
    assert "target" not in summary(alone, yardsticks, target=None, total_seconds=12.0)
    plot(alone, yardsticks, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    model = run(replace(SMALL, stop_after=1), text())[1]
    model.float()
    written = sample(model, corpus, count=20)
    assert len(written) == len(PROMPT) + 20
    assert written == sample(model, corpus, count=20)


def command(*arguments, timeout, tmp=None):
    """Runs `pycoll demo` in a process of its own."""
    line = [sys.executable, "-m", "pycoll", "demo", *arguments]
    environment = dict(os.environ) | ({"TMPDIR": str(tmp)} if tmp else {})
    return subprocess.run(
        line, capture_output=True, text=True, timeout=timeout, check=False, env=environment
    )


@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.full), "pycoll"])
def test_the_command_stops_resumes_and_tells_when_the_target_is_missed(backend, tmp_path):
    common = ("--backend", backend, "--steps", "4", "--batch", "2", "--quiet")
    common += ("--output", str(tmp_path / "out"))
    first = command(*common, "--stop-after", "2", timeout=120)
    assert first.returncode == 1, first.stderr
    assert "target was not reached" in first.stderr
    second = command(*common, "--resume", "--until", "9", timeout=120)
    assert second.returncode == 0, second.stderr
    history = json.loads((tmp_path / "out" / "history.json").read_text())
    assert len(history["train"]) == 4
    assert (history["backend"], history["ranks"]) == (backend, 2)
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {"checkpoint.pt", "history.json", "loss.png"}


def test_a_rank_that_fails_is_named_and_nothing_is_left(tmp_path):
    # Rank 0 cannot write its checkpoint: there is a folder in the way.
    (tmp_path / "out" / "checkpoint.pt.part").mkdir(parents=True)
    (tmp_path / "tmp").mkdir()
    line = ("--backend", "gloo", "--steps", "1", "--batch", "2", "--quiet")
    done = command(*line, "--output", str(tmp_path / "out"), timeout=120, tmp=tmp_path / "tmp")
    assert done.returncode == 1
    assert "rank 0 failed" in done.stderr
    assert "IsADirectoryError" in done.stderr
    assert "target was not reached" not in done.stderr
    # (torch makes its compiler's cache folder whenever it is imported.)
    left = [f.name for f in (tmp_path / "tmp").iterdir() if "torchinductor" not in f.name]
    assert left == []


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_demo_beats_every_trigram_model(backend, tmp_path):
    done = command("--backend", backend, "--output", str(tmp_path), timeout=900)
    assert done.returncode == 0, done.stderr
    history = json.loads((tmp_path / "history.json").read_text())
    loss = history["validation"][-1][1]
    assert loss < history["yardsticks"]["entropy"]
    assert loss < 1.4
