"""What is done to a cache: begin and commit a pass, join, reorder, snapshot."""
