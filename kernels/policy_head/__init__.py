"""The policy head: from hidden states to the loss and its gradient without storing the logits."""

from megadapo.kernels.policy_head.head import PolicyHeadOutput, policy_head_loss, token_logprobs
from megadapo.kernels.policy_head.tiling import HeadOptions

__all__ = ["HeadOptions", "PolicyHeadOutput", "policy_head_loss", "token_logprobs"]
