"""Sharded checkpoints (format version 2): every rank writes its own state, and a run under any plan can read it.

    stage-0-replica-0.safetensors      p/BLOCK, m1/BLOCK, m2/BLOCK: flat f32 elements [start, stop) of each block
    stage-0-replica-1.safetensors      the next elements of the same blocks
    manifest.json                      size, SHA-256 and pieces [BLOCK, start, stop] of each file; updates by block

There is one file for each rank with state of its own; what several replicas hold alike, the first one writes. Padding
of shards is not written, so the pieces of a block join to the same tensor under every plan.

A tensor-parallel rank's file, `stage-S-replica-R-peer-P.safetensors`, has pieces of the rank's own flat tensors. Its
manifest entry says `"peer": [P, T]`: number P of T. The pieces of each peer join to its tensors, and all peers' tensors
to the whole ones. Likewise `"expert_rank": [E, N]` says of which experts the pieces of mlps are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.tensor_ranks import model_of_rank, rank_model, shares_heads
from ratrain.ratrain_ir.model.blocks import Block, has_experts, trained_blocks, trained_parameters
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.support.text import shown
from ratrain.targets.runtime.arena.tensor_file import Float32, StoredTensor, open_tensors, write_tensors
from ratrain.targets.runtime.checkpoint.checkpoint import (
    FORMAT,
    HashingStream,
    biases_entry,
    check_content,
    contradicts,
    read_biases,
    read_counts,
    read_manifest,
    saved_model,
    sync_file,
    write_manifest,
)
from ratrain.targets.runtime.checkpoint.rank_state import choice_bias, whole_of_experts, whole_pieces
from ratrain.targets.runtime.checkpoint.training_state import STATE_KINDS, BlockStates, TrainingState
from ratrain.targets.runtime.weights.weight_source import FlatPieces, WeightSource
from ratrain.targets.runtime.weights.weights import block_elements, named_parameters

if TYPE_CHECKING:
    from ratrain.targets.runtime.engine.rank import RankExecutor

SHARDED_VERSION = 2

_WHOLE = (0, 1)


@frozen
class ShardPiece:
    """Elements [start, stop) of a block's flat tensors, the updates applied to it, and its router's bias if it has one.

    Updates and biases go into the manifest.
    """

    block: str
    start: int
    stop: int
    updates: int
    bias: tuple[float, ...] = ()


@frozen
class ShardFile:
    """File that a rank wrote."""

    name: str
    size: int
    sha256: str
    pieces: tuple[ShardPiece, ...]
    peer: tuple[int, int] = _WHOLE
    """(peer, count): tensor-parallel rank whose flat tensors the pieces belong to"""
    expert_rank: tuple[int, int] = _WHOLE
    """(rank, count): expert rank whose flat tensors of mlps the pieces belong to"""


def holds_own_state(rank: RankExecutor) -> bool:
    """Return True if a rank has state to write: if several replicas hold the same state, only the first writes it."""
    topology = rank.program.topology
    return any(topology.is_first_holder(block, rank.replica) for block in topology.stage_blocks[rank.stage_index])


def write_shard(folder: Path, rank: RankExecutor) -> ShardFile:
    """Write a rank's state to a file, which is on disk when this returns.

    Raises `DiagnosticError` RT002, naming the rank, where it cannot be written.
    """
    peers = rank.program.plan.tp
    suffix = f"-peer-{rank.peer}" if peers > 1 else ""
    name = f"stage-{rank.stage_index}-replica-{rank.replica}{suffix}.safetensors"
    pieces = tuple(_pieces(rank))
    shapes = {f"{kind}/{piece.block}": (piece.stop - piece.start,) for piece in pieces for kind in STATE_KINDS}
    # Generators: each piece is taken from the arena when it is written.
    tensors = (
        (held for _, held in rank.carried_pieces(kind, piece.block, 0, piece.stop - piece.start))
        for piece in pieces
        for kind in STATE_KINDS
    )
    try:
        with (folder / name).open("xb") as stream:
            hashing = HashingStream(stream)
            write_tensors(hashing, shapes, tensors, {"format": FORMAT})
            sync_file(stream)
    except OSError as error:
        fail("RT002", f"{rank.name} cannot write '{folder / name}': {error.strerror or error}")
    ranks = rank.program.plan.ep
    parts = (rank.peer, peers), (rank.replica % ranks, ranks)
    return ShardFile(name, hashing.size, hashing.sha256.hexdigest(), pieces, *parts)


def _pieces(rank: RankExecutor) -> Iterator[ShardPiece]:
    """Yield the pieces that a rank writes."""
    model, topology = rank_model(rank.program.model, rank.program.plan), rank.program.topology
    for block in topology.stage_blocks[rank.stage_index]:
        if not trained_parameters(model, block):
            continue
        shard = topology.shard_range(block, rank.replica)
        # The last shards of a block are padded, or padding alone: it depends on the number of replicas, so it is left
        # out.
        stop = min(shard.stop, block_elements(model, block))
        if shard.start < stop and topology.is_first_holder(block, rank.replica):
            bias = choice_bias(rank, block)
            numbers = () if bias is None else tuple(bias.tolist())
            yield ShardPiece(str(block), shard.start, stop, int(rank.carried("t", str(block))[0]), numbers)


def seal_shards(
    folder: Path,
    model: ModelConfig,
    step: int,
    scale: tuple[float, float],
    files: list[ShardFile],
    run: Mapping[str, Any],
    companions: Mapping[str, bytes] | None = None,
) -> None:
    """Write the manifest that turns a folder of shard files into a checkpoint. Raises OSError."""
    entries = {
        file.name: {
            "bytes": file.size,
            "sha256": file.sha256,
            "pieces": [[piece.block, piece.start, piece.stop] for piece in file.pieces],
            **({} if file.peer == _WHOLE else {"peer": list(file.peer)}),
            **({} if file.expert_rank == _WHOLE else {"expert_rank": list(file.expert_rank)}),
        }
        for file in files
    }
    updates = {piece.block: piece.updates for file in files for piece in file.pieces}
    biases = {piece.block: piece.bias for file in files for piece in file.pieces if piece.bias}
    rest = {"updates": updates, **biases_entry(biases), "files": entries, "run": dict(run)}
    write_manifest(folder, SHARDED_VERSION, model, step, scale, rest, companions or {})


def load_shards(
    directory: str, model: ModelConfig, *, share: tuple[int, int] = (0, 1)
) -> tuple[TrainingState, dict[str, Any]]:
    """Open a sharded checkpoint; return its state and the caller's record. Blocks are read when they are asked for.

    With `share` = (i, n) only every n-th file, from the i-th on, is hashed: n processes together check all of them.
    Raises RT002 (cannot be read) and RT092: not a checkpoint, of another version, changed or damaged, of another model,
    pieces missing.
    """
    manifest = read_manifest(directory, (SHARDED_VERSION,))
    step, scale, updates, run = read_counts(directory, manifest, model)
    pieces = _checked_pieces(directory, model, manifest.get("files"), share)
    biases = read_biases(directory, manifest, model)
    return TrainingState(step, _ShardStates(model, pieces, updates), scale, biases), run


def shard_weights(directory: str) -> tuple[ModelConfig, WeightSource]:
    """Open a sharded checkpoint; return its model and its master weights.

    Raises RT002 (cannot be read) and RT092 as `load_shards` does.
    """
    manifest = read_manifest(directory, (SHARDED_VERSION,))
    model = saved_model(directory, manifest)
    pieces = _checked_pieces(directory, model, manifest.get("files"), (0, 1))
    # Reversed, so that `embed` overwrites `head` for a tied matrix, as in files of weights.
    places = {
        parameter.name: (block, parameter.offset)
        for block in reversed(trained_blocks(model))
        for parameter in trained_parameters(model, block)
    }
    return model, _ShardMasters(named_parameters(model), places, pieces)


@frozen(eq=False)
class _ShardMasters(WeightSource):
    """Master weights of a sharded checkpoint."""

    places: Mapping[str, tuple[Block, int]]
    """block that holds a parameter, and its offset there"""
    stored: _StoredPieces

    def pieces(self, name: str, start: int, stop: int) -> Iterator[Float32]:
        """Yield elements [start, stop) of a parameter's flat values."""
        block, offset = self.places[name]
        return (piece for _, piece in self.stored.read(block, "p", start + offset, stop + offset))


def _checked_pieces(directory: str, model: ModelConfig, files: object, share: tuple[int, int]) -> _StoredPieces:
    """Return the pieces of all blocks; hash only a share of the files."""
    if not isinstance(files, dict) or not files or not all(map(_is_file_entry, files.items())):
        contradicts(directory, "files")
    (peers, *others) = {_peer_of(entry)[1] for entry in files.values()}
    (ranks, *other_ranks) = {_expert_rank_of(entry)[1] for entry in files.values()}
    shared = ranks == 1 or (model.experts is not None and model.experts % ranks == 0 and peers == 1)
    if others or other_ranks or not shares_heads(model, peers) or not shared:
        contradicts(directory, "files")
    # Hashing reads every byte, so processes share it out; sorted, so that they number the files alike.
    for number, (name, entry) in enumerate(sorted(files.items())):
        if number % share[1] == share[0]:
            check_content(str(Path(directory) / name), entry)
    return _stored_pieces(directory, model, files, peers, ranks)


def _is_file_entry(item: tuple[str, object]) -> bool:
    """Return True if a file's name and manifest entry are well formed."""
    name, entry = item
    # The manifest may come from anybody: a name with a folder in it could lead anywhere.
    is_name = Path(name).name == name and name.isprintable()
    if not (is_name and isinstance(entry, dict) and isinstance(entry.get("pieces"), list)):
        return False
    return _is_peer(_peer_of(entry)) and _is_peer(_expert_rank_of(entry))


def _peer_of(entry: Mapping[str, Any]) -> Any:
    """Return (peer, count) of a file's manifest entry; an entry without one has whole tensors."""
    return entry.get("peer", _WHOLE)


def _expert_rank_of(entry: Mapping[str, Any]) -> Any:
    """Return (rank, count) of the expert rank of a file's manifest entry; an entry without one has all experts."""
    return entry.get("expert_rank", _WHOLE)


def _is_peer(peer: object) -> bool:
    if not isinstance(peer, list | tuple) or len(peer) != 2 or not all(type(number) is int for number in peer):
        return False
    return bool(0 <= peer[0] < peer[1])


@frozen(eq=False)
class _StoredPiece:
    """Elements [start, stop) of a block's flat tensors in an open file."""

    start: int
    stop: int
    tensors: dict[str, StoredTensor]
    """by state kind"""


@frozen(eq=False)
class _StoredPieces:
    """Pieces of every block by tensor-parallel or expert rank; one rank's pieces join to its part of the block."""

    model: ModelConfig
    of_peers: Mapping[Block, Sequence[Sequence[_StoredPiece]]]
    expert_ranks: int

    def read(self, block: Block, kind: str, start: int, stop: int) -> FlatPieces:
        """Yield elements [start, stop) of a block's whole tensor of a kind."""
        readers = [partial(_pieces_of, pieces, kind) for pieces in self.of_peers[block]]
        if self.expert_ranks > 1 and has_experts(self.model, block):
            return whole_of_experts(self.model, block, readers)(start, stop)
        return whole_pieces(self.model, block, readers)(start, stop)


def _stored_pieces(
    directory: str, model: ModelConfig, files: Mapping[str, Any], peers: int, expert_ranks: int
) -> _StoredPieces:
    """Open the files of `peers` tensor-parallel ranks, or of some expert ranks.

    Raises `DiagnosticError` RT092 unless each element of every block is there exactly once.
    """
    blocks = {str(block): block for block in trained_blocks(model)}
    pieces_of: dict[Block, list[list[_StoredPiece]]] = {
        block: [[] for _ in range(expert_ranks if expert_ranks > 1 and has_experts(model, block) else peers)]
        for block in blocks.values()
    }
    for name, entry in files.items():
        path = str(Path(directory) / name)
        stored = open_tensors(path, "RT092")
        for piece in entry["pieces"]:
            if not _is_piece(piece, blocks):
                contradicts(directory, "files")
            owner, start, stop = piece
            tensors = {kind: stored.get(f"{kind}/{owner}") for kind in STATE_KINDS}
            sound = {
                kind: tensor
                for kind, tensor in tensors.items()
                if tensor is not None and (tensor.dtype, tensor.shape) == ("F32", (stop - start,))
            }
            if len(sound) < len(STATE_KINDS):
                fail(
                    "RT092", f"'{path}' lacks elements {start} to {stop} of {shown(owner)}, or has them in another type"
                )
            of_experts = expert_ranks > 1 and has_experts(model, blocks[owner])
            number = (_expert_rank_of(entry) if of_experts else _peer_of(entry))[0]
            pieces_of[blocks[owner]][number].append(_StoredPiece(start, stop, sound))
    own = evolve(model_of_rank(model, peers), expert_ranks=expert_ranks)
    for block, parts in pieces_of.items():
        for number, pieces in enumerate(parts):
            whose = "" if len(parts) == 1 else f" of {'peer' if expert_ranks == 1 else 'expert rank'} {number}"
            _check_whole(directory, block, pieces, own, whose)
    return _StoredPieces(model, pieces_of, expert_ranks)


def _check_whole(directory: str, block: Block, pieces: list[_StoredPiece], model: ModelConfig, whose: str) -> None:
    """Sort a block's pieces. Raises RT092 unless they cover each element of the block once."""
    pieces.sort(key=lambda piece: piece.start)
    # Sorted pieces cover the block once if each begins where the one before ends.
    ends = [0, *(piece.stop for piece in pieces)]
    if [piece.start for piece in pieces] != ends[:-1] or ends[-1] != block_elements(model, block):
        fail("RT092", f"the files of the checkpoint '{directory}' do not hold each element of {block}{whose} once")


def _is_piece(piece: object, blocks: Mapping[str, Block]) -> bool:
    return (
        isinstance(piece, list)
        and len(piece) == 3
        and isinstance(piece[0], str)
        and piece[0] in blocks
        and all(type(end) is int for end in piece[1:])
        and 0 <= piece[1] < piece[2]
    )


@frozen(eq=False)
class _ShardStates(BlockStates):
    """Block states of a sharded checkpoint."""

    stored: _StoredPieces
    updates_of: Mapping[str, int]

    def pieces(self, block: Block, kind: str, start: int, stop: int) -> FlatPieces:
        """Yield elements [start, stop) of a block's tensor of a kind."""
        return self.stored.read(block, kind, start, stop)

    def updates(self, block: Block) -> int:
        """Return the number of updates applied to a block."""
        return self.updates_of[str(block)]


def _pieces_of(stored: Sequence[_StoredPiece], kind: str, start: int, stop: int) -> FlatPieces:
    """Yield elements [start, stop) of a block's flat tensor from the pieces that ranks wrote."""
    for part in stored:
        at, end = max(start, part.start), min(stop, part.stop)
        if at < end:
            for piece in part.tensors[kind].pieces(at - part.start, end - part.start):
                yield at, piece
                at += piece.size
