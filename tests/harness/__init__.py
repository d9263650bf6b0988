"""What several tests share: small runs and their files, networks, image files, machines and VAE files."""
