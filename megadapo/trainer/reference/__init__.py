"""The reference policy and the KL divergence to it."""
