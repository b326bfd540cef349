"""`megadapo new`: a recipe for a model, rows and a machine."""
