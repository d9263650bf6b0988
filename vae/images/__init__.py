"""Image files: their folder, format, decoding and colours, and the values of their pixels."""
