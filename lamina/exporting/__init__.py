"""Export: a model and its cache as programs that run without Lamina's model code."""
