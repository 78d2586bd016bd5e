"""Where the tensors of a layer are stored: on the device, on the host, or in pages of a pool."""
