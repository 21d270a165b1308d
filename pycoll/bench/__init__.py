"""What `pycoll bench` and the scripts in benchmarks/ measure with.

plan         what to measure and how, and what comes out: plain data, no torch
collectives  the table of collectives, with nccl-tests' bandwidth factors
problem      one of them at one size: what goes in, what must come out
calls        a collective of a backend as a plain function of prepared arguments
memory       buffers: ordinary or shareable, rotated through when they must be cold
limit        the hand-written loop over memory of two ranks: the physical limit
measure      the ranks' side: contenders interleaved, in the same processes
launch       starts ranks, or runs inside torchrun's
report, plot tables, JSON, pictures
"""
