"""The symbolic comparison of answers by math-verify, beside the string rule."""
