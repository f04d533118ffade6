"""The model that ships with the package: its task (arithmetic), tokenizer, training and evaluation."""
