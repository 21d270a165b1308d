"""The demo: a character transformer trained with stock DistributedDataParallel."""
