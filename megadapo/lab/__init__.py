"""Tools around the trainer; nothing in the product imports them."""
