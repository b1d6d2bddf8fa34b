"""`batchinf validate`: checks spec, input, model and prompts without an engine, and shows rows as they will run."""
