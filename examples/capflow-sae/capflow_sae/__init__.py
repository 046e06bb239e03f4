"""A consumer that trains a sparse autoencoder on rows while the model runs."""
