"""The layers that models are made of, sharded over TP and EP ranks."""
