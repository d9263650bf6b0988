"""What several tests share: small runs, networks, image files, machines and VAE files."""
