"""A job before it runs: spec, model and input opened, its rows chosen and ordered, its output size estimated."""
