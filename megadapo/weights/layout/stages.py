"""Which layers each pipeline stage of a trainer holds, in how many chunks; the same on every rank.

Chunk c of all stages comes before chunk c + 1 of any: with two stages of two chunks, stage 0 has
the first and the third quarter of the layers.
"""

from __future__ import annotations

from megadapo.errors import WeightError


def stage_chunks(
    num_layers: int, *, pp_size: int, vpp_size: int = 1, first: int = 0, last: int = 0
) -> list[list[range]]:
    """[stage][chunk] -> the layers of the whole model that it holds.

    What is left over after an even split goes to the first chunks in the order of the model.

    Args:
        pp_size: stages.
        vpp_size: chunks of each stage.
        first: layers of the first stage; 0: as many as the others.
        last: layers of the last stage; 0: as many as the others.

    Raises:
        WeightError: some chunk would have no layer.
    """
    chunks: list[list[range]] = [[] for _ in range(pp_size)]
    start = 0
    for number, size in enumerate(_chunk_sizes(num_layers, pp_size, vpp_size, first, last)):
        if size < 1:
            raise WeightError(
                f"{num_layers} layers cannot be spread over {pp_size} stages of {vpp_size} chunks."
            )
        chunks[number % pp_size].append(range(start, start + size))
        start += size
    return chunks


def stage_layers(
    num_layers: int, *, pp_size: int, vpp_size: int = 1, first: int = 0, last: int = 0
) -> list[tuple[int, ...]]:
    """[stage] -> the layers it holds, ascending; arguments as for `stage_chunks`."""
    chunks = stage_chunks(num_layers, pp_size=pp_size, vpp_size=vpp_size, first=first, last=last)
    return [tuple(layer for chunk in stage for layer in chunk) for stage in chunks]


def _chunk_sizes(num_layers: int, pp_size: int, vpp_size: int, first: int, last: int) -> list[int]:
    """Layers of each chunk, in the order of the model."""
    fixed = {0: first} if first else {}
    fixed |= {pp_size - 1: last} if last else {}
    per_chunk = {stage: size // vpp_size for stage, size in fixed.items()}
    num_even = vpp_size * (pp_size - len(fixed))
    rest = num_layers - sum(per_chunk.values()) * vpp_size
    base, left = divmod(rest, num_even) if num_even else (0, 0)
    sizes = []
    for chunk in range(pp_size * vpp_size):
        stage = chunk % pp_size
        if stage in per_chunk:
            sizes.append(per_chunk[stage])
        else:
            sizes.append(base + (left > 0))
            left -= 1
    return sizes
