-- The number of rows of each row group of Parquet file $1.
SELECT DISTINCT row_group_id, row_group_num_rows FROM parquet_metadata($1) WHERE row_group_num_rows > 0 ORDER BY 1;
