"""A model's directory and its files: what each is, read as data only, and where imported and packed ones are kept."""
