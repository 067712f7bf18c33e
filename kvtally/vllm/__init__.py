"""The connector: kvtally inside unmodified vLLM. The only package that imports vllm.

    connector.py   the class vLLM sees; delegates, and turns every exception into a miss
    scheduler.py   scheduler half: the tracked requests, their receipts and hand-offs
    loads.py       how many tokens a request may skip, and the jobs that load them
    saves.py       which blocks are saved with which step, and holding them meanwhile
    tracked_request.py  what is known about one request, and about the current attempt at it
    boundaries.py  where a request's chunks and tails end, and their chain values
    lookup_policy.py  when the store is asked about a request: early, when it is reached, again, not at all
    lookup_thread.py  the scheduler half's thread: chain values, lookups, staging, receipts; all talk with the store
    step_jobs.py   what the two halves send each other in each step
    handoff.py     how a hand-off changes a request
    worker.py      worker half: one thread that copies between engine blocks and arena slots
    layout.py      vLLM's KV-cache configuration → namespace and geometry
    counters.py    what is counted; stats.py hands it to vLLM's log and Prometheus
    events.py      KV events for what was saved
    retention.py   where vLLM keeps recurrent states, and what to say about it
    config_fields.py  every field of vLLM's configuration: whether it decides KV, and how the namespace knows
    identity.py    which weights are these, used how?
    adapters.py    which LoRA adapter is this? A thread that looks at its files
    weights.py     digests of whole files, each computed once on a machine
    compat.py      which vLLM is this?

vLLM finds it by the entry point `vllm.general_plugins`, so that a user writes nothing but
`--kv-transfer-config '{"kv_connector": "KVTally", "kv_role": "kv_both"}'`.
"""

NAME = "KVTally"
CLASS = "KVTallyConnector"


def register() -> None:
    """Called by vLLM in each of its processes."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name in (NAME, CLASS):  # a MultiConnector looks its children's statistics up by the name of their class
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, "kvtally.vllm.connector", CLASS)
