"""What a family is: the rows of one decoder layer and what its configuration takes for granted."""

from __future__ import annotations

from dataclasses import dataclass

from megadapo.models.families.rows import EMBEDDING, FINAL_NORM, HEAD, Q_NORM, Weight


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family: every weight it has, in the order Hugging Face lists them."""

    architecture: str
    """The name in `architectures` of the Hugging Face configuration."""
    layer: tuple[Weight, ...]
    """The weights of one decoder layer."""
    attention_bias: bool | None = None
    """Whether q, k and v have a bias; None where `attention_bias` of the configuration says."""
    tied_by_default: bool = False
    """`tie_word_embeddings` where the configuration is silent."""
    embedding: Weight = EMBEDDING
    final_norm: Weight = FINAL_NORM
    head: Weight = HEAD

    @property
    def has_qk_norm(self) -> bool:
        """Whether each head's q and k are normalised."""
        return Q_NORM in self.layer

    def has_optional(self, flag: str) -> bool:
        """Whether some weight is there only if the configuration sets `flag`."""
        return any(row.only_if == flag for row in self.layer)
