"""A sparse autoencoder that is trained on rows while the model runs."""
