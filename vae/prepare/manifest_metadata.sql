-- Add what others have written into the manifest to the metadata of the images.
UPDATE images SET metadata = json_merge_patch(coalesce(metadata, '{}'::JSON), m.more)
FROM manifest AS m WHERE m.path = images.name AND m.more IS NOT NULL;
