"""Attention over a paged KV cache, for a flat batch that mixes prompts, chunks of prompts and decodes (lesson 01).

Each token attends to its own sequence up to itself. K and V of a sequence lie in blocks anywhere in the cache and
are found through its block table: softmax(q k^T * scale) v, which `paged_attention_reference` spells out.

`paged_attention_cpu` computes the same in two parts: `plan_attention` cuts the ragged batch into rectangles (it
depends on the batch only, so all layers of a step share it), and `attend` computes them as batches of matrices.

Sources: Vaswani et al., "Attention Is All You Need", 2017; Kwon et al., "Efficient Memory Management for LLM
Serving with PagedAttention", SOSP 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from teachllm_kernels.attention.kv_quantization import KVScales, as_bytes, dequantize_kv_reference

# Query rows per rectangle and sequence: longer rectangles compute scores that no query may see.
_QUERY_TILE = 128
# With this few query rows per KV head, V is summed where it lies; with more, gathering it for a product pays.
_FEW_QUERY_ROWS = 8
# The number of padding scores that cost as much as starting another rectangle; measured on a CPU.
_PADDING_WORTH_A_LAUNCH = 512


@dataclass(frozen=True, slots=True)
class TreeMask:
    """Describe what the queries of one sequence see if some of its last tokens are a tree of drafts.

    Attributes:
        base: index of the first key in the mask; all keys before it are seen.
        sees: per query a bit mask; bit j: it sees key base + j.
        positions: each query's position relative to the first token; less than its index if branches lie side by side.
            It matters for a window, which is longer than the tree is deep.
    """

    base: int
    sees: tuple[int, ...]
    positions: tuple[int, ...]


Trees = Sequence[TreeMask | None] | None


def paged_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_lens: list[int],
    kv_lens: list[int],
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    trees: Trees = None,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """The definition, one sequence after the other: causal grouped-query attention, in float32 (float64 stays).

    Args:
        q: [num_tokens, num_heads, head_size]; the tokens of sequence i follow those of sequence i - 1.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_size], this step's tokens already written.
        block_tables: [num_seqs, max_blocks] integers, logical to physical block.
        query_lens: tokens of each sequence in this batch, its last ones.
        kv_lens: length of each sequence, this batch's tokens included.
        scale: multiplies the dot products.
        window: a token sees itself and the `window - 1` tokens before it; None sees all.
        soft_cap: squeezes each score into (-soft_cap, soft_cap) by tanh.
        trees: of each sequence; None: a token sees all before it.
        scales: scales of K and V, if the cache is quantized.

    Returns:
        [num_tokens, num_heads, head_size] in the dtype of `q`.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k_cache.shape[2]
    outputs = []
    masks = [None] * len(kv_lens) if trees is None else trees
    for queries, table, kv_len, tree in zip(
        q.to(wide).split(query_lens), block_tables.long(), kv_lens, masks, strict=True
    ):
        # The sequence's blocks in logical order, as one run of tokens: [kv_len, num_heads, head_size].
        k, v = (x_cache[table].flatten(0, 1)[:kv_len] for x_cache in (k_cache, v_cache))
        if scales is not None:
            k, v = dequantize_kv_reference(k, scales[0], wide), dequantize_kv_reference(v, scales[1], wide)
        k, v = (x.to(wide).repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", queries, k) * scale
        if soft_cap is not None:
            scores = torch.tanh(scores / soft_cap) * soft_cap
        position = torch.arange(kv_len - len(queries), kv_len, device=q.device).unsqueeze(1)
        key = torch.arange(kv_len, device=q.device)
        unseen = key > position
        if tree is not None:
            position = torch.tensor(tree.positions, device=q.device).unsqueeze(1)
            seen = [[k < tree.base or bool(bits >> (k - tree.base) & 1) for k in range(kv_len)] for bits in tree.sees]
            unseen = ~torch.tensor(seen, device=q.device)
        if window is not None:
            unseen = unseen | (key <= position - window)
        weights = scores.masked_fill(unseen, float("-inf")).softmax(dim=-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outputs).to(q.dtype)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Queries [start, start + num_queries) of sequence `seq`, and the keys that they may see.

    Attributes:
        first_token: where the first query lies in the flat batch.
        kv_begin, kv_end: sequence indices of the keys; the last query is the token at `kv_end - 1`.
        tree: what these queries see, if not all before them.
    """

    seq: int
    first_token: int
    num_queries: int
    kv_begin: int
    kv_end: int
    tree: TreeMask | None = None

    @property
    def num_keys(self) -> int:
        return self.kv_end - self.kv_begin


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Tiles with the same number of queries, their keys padded to the longest, computed as one batch of matrices.

    Attributes:
        num_tiles, num_keys: the number of tiles, and of keys in the longest tile.
        tokens: [num_tiles * num_queries] int64, rows of the flat batch; None if they are all of it, in order.
        span: the first slot and one past the last, if a single tile's keys lie side by side and are read in place;
            None if they must be gathered.
        cache_rows: [num_tiles, num_kv_heads, num_keys] int64, rows of a cache seen as [slots * heads, head_size];
            None if `span` is set.
        bags: [num_tiles * num_heads * num_queries, num_keys] int64, `cache_rows` for every query row separately;
            None if there are many, or if `span` is set.
        mask: [num_tiles, 1, 1, num_queries, num_keys] bool, True where a query may not look; None if it may
            look everywhere.
    """

    num_tiles: int
    num_keys: int
    tokens: torch.Tensor | None
    span: tuple[int, int] | None
    cache_rows: torch.Tensor | None
    bags: torch.Tensor | None
    mask: torch.Tensor | None


def plan_attention(
    block_tables: torch.Tensor,
    query_lens: list[int],
    kv_lens: list[int],
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    window: int | None = None,
    trees: Trees = None,
) -> list[Rectangle]:
    """Plan a step's attention; the plan is the same for all layers with the same heads and `window`.

    The arguments are those of `paged_attention_reference`.
    """
    tiles: list[_Tile] = []
    first_token = 0
    for seq, (num_queries, kv_len) in enumerate(zip(query_lens, kv_lens, strict=True)):
        tree = None if trees is None else trees[seq]
        if tree is not None:
            kv_begin = 0 if window is None else max(0, tree.positions[0] - window + 1)
            tiles.append(_Tile(seq, first_token, num_queries, kv_begin, kv_len, tree))
            first_token += num_queries
            continue
        for offset in range(0, num_queries, _QUERY_TILE):
            size = min(_QUERY_TILE, num_queries - offset)
            position = kv_len - num_queries + offset
            kv_begin = 0 if window is None else max(0, position - window + 1)
            tiles.append(_Tile(seq, first_token + offset, size, kv_begin, position + size))
        first_token += num_queries
    groups = _group(tiles)
    heads = num_heads, num_kv_heads
    plan = [_rectangle(group, block_tables, block_size, heads, window) for group in groups]
    return [replace(plan[0], tokens=None)] if len(tiles) == 1 else plan


def _group(tiles: list[_Tile]) -> list[list[_Tile]]:
    """Group tiles with equally many queries and similarly many keys, as long as the padding is worth it."""
    groups: list[list[_Tile]] = []
    padding = 0
    for tile in sorted(tiles, key=lambda t: (t.tree is not None, t.num_queries, t.num_keys), reverse=True):
        first = groups[-1][0] if groups else tile
        if groups and first.num_queries == tile.num_queries and (first.tree is None) == (tile.tree is None):
            padding += (groups[-1][0].num_keys - tile.num_keys) * tile.num_queries
            if padding <= _PADDING_WORTH_A_LAUNCH:
                groups[-1].append(tile)
                continue
        groups.append([tile])
        padding = 0
    return groups


def _rectangle(
    tiles: list[_Tile], block_tables: torch.Tensor, block_size: int, heads: tuple[int, int], window: int | None
) -> Rectangle:
    num_heads, num_kv_heads = heads
    device = block_tables.device
    num_queries, num_keys = tiles[0].num_queries, tiles[0].num_keys
    span = _span(tiles[0], block_tables, block_size) if len(tiles) == 1 and device.type == "cpu" else None
    if (
        span is not None and num_queries == 1 and tiles[0].tree is None
    ):  # a token that sees all keys, where they lie: nothing to compute
        return Rectangle(1, num_keys, torch.tensor([tiles[0].first_token]), span, None, None, None)
    fields = [(t.seq, t.first_token, t.kv_begin, t.kv_end) for t in tiles]
    seq, first_token, kv_begin, kv_end = torch.tensor(fields, device=device).T.unsqueeze(-1)  # each [num_tiles, 1]
    query = torch.arange(num_queries, device=device)
    tokens = (first_token + query).flatten()
    key_index = kv_begin + torch.arange(num_keys, device=device)  # [num_tiles, num_keys]
    query_index = (kv_end - num_queries + query).unsqueeze(-1)  # [num_tiles, num_queries, 1]
    mask = key_index.unsqueeze(1) > query_index
    trees = [tile.tree for tile in tiles if tile.tree is not None]
    if trees:
        base, sees = (
            torch.tensor(each, device=device) for each in zip(*((t.base, t.sees) for t in trees), strict=True)
        )
        place = (key_index - base.unsqueeze(-1)).unsqueeze(1)  # [num_tiles, 1, num_keys]
        mask = ((sees.unsqueeze(-1) >> place.clamp(0, 62)) & 1 == 0) & (place >= 0)
        mask |= key_index.unsqueeze(1) >= kv_end.unsqueeze(-1)  # padding
        query_index = torch.tensor([tree.positions for tree in trees], device=device).unsqueeze(-1)
    if window is not None:
        mask |= key_index.unsqueeze(1) <= query_index - window
    mask = mask[:, None, None]
    if span is not None:
        return Rectangle(1, num_keys, tokens, span, None, None, mask)
    # Padding reads the tile's own last key again: slots that were never written may hold NaN, and 0 * NaN is NaN.
    readable = key_index.minimum(kv_end - 1)
    slots = block_tables[seq, readable // block_size].long() * block_size + readable % block_size
    cache_rows = slots.unsqueeze(1) * num_kv_heads + torch.arange(num_kv_heads, device=device).unsqueeze(-1)
    query_rows = num_heads // num_kv_heads * num_queries
    bags = None
    if query_rows <= _FEW_QUERY_ROWS:
        bags = cache_rows.unsqueeze(2).expand(-1, -1, query_rows, -1).reshape(-1, num_keys)
    return Rectangle(len(tiles), num_keys, tokens, None, cache_rows, bags, mask)


def _span(tile: _Tile, block_tables: torch.Tensor, block_size: int) -> tuple[int, int] | None:
    """Return the slots of a tile's keys, first and one past the last, if they lie side by side."""
    blocks = block_tables[tile.seq, tile.kv_begin // block_size : (tile.kv_end - 1) // block_size + 1].tolist()
    if blocks != list(range(blocks[0], blocks[0] + len(blocks))):
        return None
    first = blocks[0] * block_size + tile.kv_begin % block_size
    return first, first + tile.num_keys


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: list[Rectangle],
    scale: float,
    soft_cap: float | None = None,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """Compute a plan. Arguments and result are those of `paged_attention_reference`."""
    if plan[0].tokens is None:
        return _attend_rectangle(q, k_cache, v_cache, plan[0], scale, soft_cap, scales).to(q.dtype)
    out = torch.empty_like(q)
    for rectangle in plan:
        assert rectangle.tokens is not None
        queries = q.index_select(0, rectangle.tokens)
        rows = _attend_rectangle(queries, k_cache, v_cache, rectangle, scale, soft_cap, scales)
        out.index_copy_(0, rectangle.tokens, rows.to(q.dtype))
    return out


def _attend_rectangle(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rectangle: Rectangle,
    scale: float,
    soft_cap: float | None,
    scales: KVScales | None,
) -> torch.Tensor:
    """Return softmax(q k^T * scale) v for one rectangle: [num_tiles * num_queries, num_heads, head_size]."""
    num_tokens, num_heads, head_size = q.shape
    num_tiles, num_kv_heads, num_keys = rectangle.num_tiles, k_cache.shape[2], rectangle.num_keys
    num_queries, group = num_tokens // num_tiles, num_heads // num_kv_heads
    wide = torch.promote_types(q.dtype, torch.float32)
    if rectangle.span is not None and soft_cap is None and q.dtype == k_cache.dtype == wide:
        # One sequence whose keys need no gathering: what PyTorch's fused attention takes as it is.
        keys, values = _read(k_cache, rectangle), _read(v_cache, rectangle)
        seen = None if rectangle.mask is None else ~rectangle.mask[:, 0]
        heads_first = q.transpose(0, 1).unsqueeze(0)  # [1, num_heads, num_queries, head_size]
        fused = F.scaled_dot_product_attention(heads_first, keys, values, seen, scale=scale, enable_gqa=group > 1)
        return fused.squeeze(0).transpose(0, 1)
    # The query heads that share a KV head become further rows of its matrix: K and V are never repeated.
    queries = (q.to(wide) * scale).view(num_tiles, num_queries, num_kv_heads, group, head_size).permute(0, 2, 3, 1, 4)
    queries = queries.reshape(num_tiles, num_kv_heads, group * num_queries, head_size)
    # K is freed before more is allocated, which then takes its place: fresh pages cost more than the gather.
    keys = _read(k_cache, rectangle).to(wide)
    scores = queries @ keys.transpose(-1, -2)  # [num_tiles, num_kv_heads, group * num_queries, num_keys]
    del keys
    if scales is not None:  # K was quantized
        scores *= scales[0].to(wide)[:, None, None]
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    if rectangle.mask is not None:
        per_query = scores.view(num_tiles, num_kv_heads, group, num_queries, num_keys)
        per_query.masked_fill_(rectangle.mask, float("-inf"))
    weights = torch.softmax(scores, dim=-1, out=scores)  # in their place: they are the most that a step allocates
    if rectangle.bags is not None and v_cache.dtype == wide:
        # A bag is a weighted sum of table rows: V is read once, from where it lies, and never copied.
        table, per_row = v_cache.view(-1, head_size), weights.view(-1, num_keys)
        result = F.embedding_bag(rectangle.bags, table, mode="sum", per_sample_weights=per_row)
    else:
        result = weights @ _read(v_cache, rectangle).to(wide)
    if scales is not None:
        result *= scales[1].to(wide)[:, None, None]
    result = result.view(num_tiles, num_kv_heads, group, num_queries, head_size)
    return result.permute(0, 3, 1, 2, 4).reshape(num_tokens, num_heads, head_size)


def _read(cache: torch.Tensor, rectangle: Rectangle) -> torch.Tensor:
    """Return K or V of a rectangle, [num_tiles, num_kv_heads, num_keys, head_size]."""
    num_kv_heads, head_size = cache.shape[2:]
    if rectangle.span is not None:
        first, end = rectangle.span
        return cache.view(-1, num_kv_heads, head_size)[first:end].transpose(0, 1).unsqueeze(0)
    assert rectangle.cache_rows is not None
    # An embedding look-up is torch's fastest gather of short rows.
    return F.embedding(rectangle.cache_rows, as_bytes(cache).view(-1, head_size)).view(cache.dtype)


def paged_attention_cpu(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_lens: list[int],
    kv_lens: list[int],
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    trees: Trees = None,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """Compute `paged_attention_reference`, equal up to rounding, and fast on a CPU."""
    block_size, num_kv_heads = k_cache.shape[1:3]
    plan = plan_attention(block_tables, query_lens, kv_lens, block_size, q.shape[1], num_kv_heads, window, trees)
    return attend(q, k_cache, v_cache, plan, scale, soft_cap, scales)


def cost(
    query_lens: list[int],
    kv_lens: list[int],
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    dtype_bytes: int = 2,
    kv_bytes: int | None = None,
) -> tuple[int, int]:
    """Return (bytes, FLOPs) that any implementation must spend without a window: q in, out out, each K and V once.

    Args:
        kv_bytes: bytes per element of the cache; None: as in q.
    """
    num_tokens, num_keys = sum(query_lens), sum(kv_lens)
    # The tokens of a sequence see kv_len - query_len + 1, ..., kv_len keys.
    pairs = sum(n * kv - n * (n - 1) // 2 for n, kv in zip(query_lens, kv_lens, strict=True))
    num_bytes = 2 * num_tokens * num_heads * head_size * dtype_bytes
    num_bytes += 2 * num_keys * num_kv_heads * head_size * (dtype_bytes if kv_bytes is None else kv_bytes)
    return num_bytes, 4 * pairs * num_heads * head_size
