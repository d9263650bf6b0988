-- The subsets of the manifest: an image that it does not name trains.
UPDATE images SET subset = if(name IN (SELECT path FROM manifest WHERE split = 'val'), 'val', 'train')
WHERE reason = '';
