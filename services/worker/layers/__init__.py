"""The layers that models are built from, sharded over TP and EP ranks."""
