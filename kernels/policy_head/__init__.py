"""The policy head: from hidden states to the loss and its gradient without storing the logits."""

from megadapo.kernels.policy_head.head import PolicyHeadOutput, policy_head_loss, token_logprobs

__all__ = ["PolicyHeadOutput", "policy_head_loss", "token_logprobs"]
