"""Products with weight matrices in any format, and mixtures of experts that are made of them."""
