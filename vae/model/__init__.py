"""The networks: the autoencoder, its layers and first weights, and the discriminator."""
