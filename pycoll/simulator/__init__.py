"""What a collective would take on a machine that is described in a file: see docs/architecture.md.

The engine is native (`_core.simulate`); here are topology files and sweeps over sizes.
"""
