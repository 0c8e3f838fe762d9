"""The texts of `moe-coord help TOPIC`: what a person needs to know to choose, and nothing more.

Texts only. A test keeps every flag they name a real one, and every topic of `commands.TOPICS` here.
"""

from collections.abc import Mapping

from coordinator.command.commands import TOPICS

MEMORY = """\
memory: one budget for everything

  --memory 1500M      what all processes together may use. Left out, it is what the system has
                      available, or what the container's limit leaves, less a reserve of 8 % or
                      256 MiB.
  --pool 800M         the part that holds experts; also 40% of them, or all. Left out, it is
                      what the budget leaves.
  --context 4096      tokens of the longest text, question and answer together. Left out, a
                      fifth of the budget; for one prompt, what it and its answer can need.
  --kv-type f16       how the memory of the text is kept: f32, f16, or q8_0, the smallest
  --chunk 256         prompt tokens that are computed together: more is faster and takes more
  --experts-in own    once all experts fit, keep them in compute's own memory, with huge pages: read
                      faster than the pool on most machines, and longer to start; pool: do not.
                      Left out, a trial at start decides
  --mlock off         do not ask the system to keep weights and pool out of swap; require ends
                      the run where it refuses, the default says so once
  --dense mapped      leave the dense weights to the page cache; so it is done where the budget
                      does not hold them

The dense weights, which every token needs, are read once and stay. Experts come and go through the
pool; the more of them it holds, the fewer are read. One token touches some experts in every layer;
their bytes together are the token cycle. A pool below it holds nothing long enough to be used
again under the plain rule (see `moe-coord help policies`).

When other programs take the memory, the pool gives way in steps and grows back when they end; the
tokens stay the same. It keeps 32 MiB or more of the limit free for that, so a --memory closer to
the limit gains nothing.

`moe-coord map MODEL` shows how large each part is, `moe-coord plan MODEL` what a run would do with
this memory and disk, and how fast. What does not fit is refused before anything is allocated, with
the numbers. Sizes: 800M and 800MiB are 1024 × 1024 × 800 bytes, 800MB is 800
million."""

CORES = """\
cores: who runs where

  --pin-cores              give every process its cores, and print the plan
  --core-plan NAME         shared, split, last, or your own: compute=0,1,io=1
  --compute-threads 2      threads that multiply; left out, one per core of the plan
  --io-workers 1           processes that read experts
  --queue-depth 4          reads that each of them keeps going at once
  --io-workers 0           no such process: the compute process reads for itself, between its
                           multiplications, or with --io-threads 2 in threads beside them
  --single-process         no second process of any kind: what coordination costs shows against it
  --poll off               compute sleeps at once when it waits for experts. Else it keeps its
                           first core awake for up to 4 ms, where no other process has that core and
                           no thread of its own reads: a core that sleeps, above all a virtual
                           one, takes long to wake up

shared   compute on all cores, everything else on the last one. The default on two cores.
split    compute on all cores but the last, everything else alone on the last.
last     the same as split. The default on three cores or more.
your own a role (compute, io, coordinator, http), =, its cores. What is not named goes with io.

Only the cores that this process may really use count: the affinity mask, the cpuset and the CPU
quota of the container. Without --pin-cores the system places the processes. On two cores try both:
a reader that mostly waits for the disk costs compute little, one that copies may cost it half."""

READERS = """\
readers: how experts come from the disk

into the pool, where they stay as the policy says
  --reader direct     past the page cache, straight into the pool: almost no CPU time, and nothing
                      is held in memory twice
  --reader buffered   through the page cache, paid with half a CPU second or more per GB;
                      --drop-cache no keeps a second cache there, yes does not
  --reader auto       direct where the file system takes it, unless buffered reads are much faster,
                      or most of the model is in the page cache and may stay there; it tries for
                      0.4 s, and the first lines of a run say what was chosen, and why

left in the page cache, where the kernel decides what stays: there is no pool, and --pool and
--policy are refused. --memory bounds everything but the page cache
  --reader willneed   the kernel is asked for an expert's pages and fetches them by itself
  --reader populate   an I/O worker has them fetched by one call and waits for it
  --reader mmap       an I/O worker touches every page, one page at a time; with --io-workers 0
                      nobody does, and compute takes the page faults: what a program without any
                      care for its reads gets

  --queue-depth 4     reads in flight per I/O worker; most solid-state disks are at their best from
                      two on
  --io-workers 1      processes that read; one is enough for most disks
  --read-unit layer   a miss reads all experts of its layer, to see what reading them singly gains

`moe-coord pack MODEL OUT` writes the model anew with every expert in one piece at a page, so that
one read brings it and not three; the file is used like any other, and no token changes.
`moe-coord plan MODEL` measures whether that would be faster on this disk. `moe-coord verify OUT`
compares every expert with its checksum.

A file system that refuses direct reads later, in the middle of a run, is no fault: that read and
all after it go through the page cache. A model file that is written to while it is used ends the
run, since nothing that was read can be trusted any more."""

POLICIES = """\
policies: which experts stay when the pool is full

  --policy lfu         the expert that was used least often goes; a use counts half after 32
                       tokens, and a prompt counts more than one token and less than all of them
  --policy lru         the expert that was not used for the longest time goes
  --policy layer-lru   the same within each layer's own share of the pool
  --policy slru        like lru, but an expert must be used twice before it can push out one that
                       was
  --policy static      a hot set of other texts stays, the rest is lru; needs a file of counts
  --policy calibrated  the same for half of the pool; without a file the hot set is learned from
                       the prompt and the first 32 tokens
  --policy imatrix     lfu, beginning with the counts of a quantiser's importance matrix
  --policy auto        lfu; imatrix where --imatrix is given

  --usage FILE         begin with the use counts of earlier runs, and save them at the end
  --hot-set FILE       the same, but the file stays as it is; `moe-coord calibrate` makes one
  --imatrix FILE       counts from a GGUF importance matrix; a .dat file has none per expert

The token cycle is what one token touches before it comes back to the first layer; the first lines
of a run name it. A pool that is smaller makes lru useless: by the time an expert is wanted again,
it has just been pushed out. Frequency does not have that edge, and hits more at every size too:
record a run with --trace and ask `moe-coord replay` for your own text. No policy changes the
answer: the tokens are the same, only the reads differ."""

TEXTS: Mapping[str, str] = {
    "memory": MEMORY,
    "cores": CORES,
    "readers": READERS,
    "policies": POLICIES,
}


def topic_text(topic: str | None) -> str:
    """The text of a topic of `TOPICS`; for None the list of them."""
    if topic is not None:
        return TEXTS[topic]
    lines = [TEXTS[name].splitlines()[0] for name in TOPICS]
    return "\n".join(["moe-coord help TOPIC, where TOPIC is one of", *[f"  {x}" for x in lines]])
