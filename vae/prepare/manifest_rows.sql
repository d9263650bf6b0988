-- IMAGE_KEYS of vae/data/manifest.py, of each image in the output folder.
SELECT made.path, made.sha256, made.width, made.height, name, flags, phash FROM images WHERE reason = '' ORDER BY n;
