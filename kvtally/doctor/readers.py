"""What each kind of file means: from trees and scripts to deployments. Knows formats, judges nothing. Pure.

A file that describes prefill and decode together (a ModelBooster, values, a compose file) is a deployment. Parts of one
(a script for each engine, a ModelServing and its ModelServer) are put together with those of the other files.
Neighbours: `tree` and `shell` (text), `engines` (commands), `model` (what comes out).
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Sequence
from itertools import product

import msgspec

from kvtally.doctor.engines import (
    Parts,
    Setting,
    connector_at,
    connector_of,
    contained,
    engine,
    engine_of,
    role_of,
    run,
    script,
)
from kvtally.doctor.facts import KTHENA_CONNECTORS
from kvtally.doctor.model import Connector, Deployment, Instance, Place, Role, Router, Service, Skipped, Value, Where
from kvtally.doctor.shell import commands
from kvtally.doctor.tree import Node, documents, embedded
from kvtally.errors import ConfigError

_LMCACHE_FILE = frozenset({"chunk_size", "local_cpu", "remote_url", "max_local_cpu_size", "enable_pd", "pd_role"})
_WORKLOADS = frozenset(
    {"Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "Pod", "Job", "LeaderWorkerSet", "PodTemplate"}
)
MOST_INSTANCES = 64  # of one deployment: each is compared with each
_KIND = re.compile(r"^kind:\s*\S", re.MULTILINE)


class Found(msgspec.Struct):
    """What one file holds."""

    deployments: list[Deployment] = []
    parts: Parts = msgspec.field(default_factory=Parts)
    lmcache: dict[str, dict[str, Value]] = {}  # LMCache's settings by the name of the file they stand in
    skipped: list[Skipped] = []


def read(text: str, file: str) -> Found:
    """What a file holds. Raises ConfigError if it is neither YAML nor a script."""
    found = Found()
    suffix = os.path.splitext(file)[1].lower()
    if suffix in (".sh", ".bash", ".txt", ".cmd") or text.startswith("#!"):
        _read_script(text, file, found)
        return found
    try:
        trees = documents(text, file)
    except ConfigError:
        if suffix in (".yaml", ".yml", ".json") or _KIND.search(text):
            raise
        trees = []
    if not any(tree.mapping for tree in trees):
        _read_script(text, file, found)
        return found
    for tree in trees:
        _read_document(tree, file, found)
    return found


def assemble(all_found: Sequence[Found]) -> list[Deployment]:
    """The deployments of all files. Parts that belong to none become one of their own."""
    deployments = [deployment for found in all_found for deployment in found.deployments]
    loose = Parts()
    lmcache: dict[str, dict[str, Value]] = {}
    for found in all_found:
        loose.add(found.parts)
        lmcache |= found.lmcache
    if loose.instances:
        files = sorted({instance.place.file for instance in loose.instances})
        name = os.path.basename(files[0]) if len(files) == 1 else f"{len(files)} files together"
        kind = "command lines" if all(not each.where.is_certain for each in loose.instances) else "manifests"
        deployments.append(
            Deployment(
                name=name,
                kind=kind,
                place=loose.instances[0].place,
                instances=loose.instances,
                routers=loose.routers,
                services=loose.services,
            )
        )
    elif deployments:  # a router or a server beside a whole deployment belongs to it
        for deployment in deployments:
            if loose.routers:
                derived = [router for router in deployment.routers if not router.is_derived]
                deployment.routers = [*derived, *loose.routers]
            deployment.services += loose.services
    for deployment in deployments:
        deployment.left_out = max(0, len(deployment.instances) - MOST_INSTANCES)
        del deployment.instances[MOST_INSTANCES:]
        _give_roles(deployment)
        for instance in deployment.instances:
            _gather_lmcache(instance, lmcache)
    return deployments


def _give_roles(deployment: Deployment) -> None:
    """A router that names ports says what the engines behind them are for.

    A name alone does not make an engine half of a pair: llm-d calls its only engines `decode`.
    """
    sides = {port: role for router in deployment.routers for port, role in router.sides.items()}
    for instance in deployment.instances:
        port = instance.flags.get("port")
        if instance.role is Role.BOTH and port is not None and port.text in sides:
            instance.role = sides[port.text]
    said = [connector.fields.get("kv_role") for each in deployment.instances for connector in each.connectors()]
    is_half = any(role is not None and role.text in ("kv_producer", "kv_consumer") for role in said)
    if len({instance.role for instance in deployment.instances}) == 1 and not is_half:
        for instance in deployment.instances:
            instance.role = Role.BOTH


def _gather_lmcache(instance: Instance, files: dict[str, dict[str, Value]]) -> None:
    """Later ones win: the file, the environment, the connector's own settings."""
    settings: dict[str, Value] = {}
    if path := instance.env.get("LMCACHE_CONFIG_FILE"):
        if (given := files.get(os.path.basename(path.text))) is not None:
            settings |= given
        else:
            instance.unseen.append(path)
    for name, value in instance.env.items():
        if name.startswith("LMCACHE_") and name != "LMCACHE_CONFIG_FILE":
            settings[name.removeprefix("LMCACHE_").lower()] = value
    for connector in instance.connectors():
        for name, value in connector.extra.items():
            if name.startswith("lmcache."):
                settings[name.removeprefix("lmcache.")] = value
    instance.lmcache = settings


# ---- scripts


def _read_script(text: str, file: str, found: Found) -> None:
    name = os.path.basename(file)
    around = Setting(
        name=name, where=Where(file, is_certain=False), place=Place(file, 1), role=role_of(name), has_shm=True
    )
    parts = script(Value(text, Place(file, 1)), around)
    for index, instance in enumerate(parts.instances):
        port = instance.flags.get("port")
        if len(parts.instances) > 1:
            instance.name = f"{name}:{port.text if port and port.is_known else index + 1}"
    if parts == Parts():
        found.skipped.append(Skipped(Place(file, 1), "no command that starts vLLM was found in it"))
    found.parts.add(parts)


# ---- YAML


def _read_document(tree: Node, file: str, found: Found) -> None:
    kind = tree.get("kind").text
    if kind and tree.has("apiVersion"):
        reader = _KINDS.get(kind)
        if kind == "List":
            for item in tree.get("items").items:
                _read_document(item, file, found)
        elif reader is not None:
            reader(tree, file, found)
        elif kind in _WORKLOADS:
            _read_workload(tree, file, found)
        else:
            found.skipped.append(Skipped(tree.place, f"kind {kind} is not one that doctor examines"))
        return
    for is_kind, reader in _SHAPES:
        if is_kind(tree):
            reader(tree, file, found)
            return
    names = ", ".join(list(tree.mapping)[:4]) or "nothing"
    found.skipped.append(Skipped(tree.place, f"unknown: no kind that doctor knows, only {names}"))


def _name(tree: Node, default: str) -> str:
    return tree.get("metadata", "name").text or default


def _count(node: Node) -> int:
    return node.value.number or 1


def _variables(node: Node) -> dict[str, Value]:
    """`env` of a container: a list of names and values; or of a compose file: a mapping, or NAME=value."""
    found = {name: child.value for name, child in node.mapping.items()}
    for item in node.items:
        if isinstance(item.content, str):
            name, _, text = item.text.partition("=")
            found[name] = Value(text, item.place)
        elif item.has("value"):
            found[item.get("name").text] = item.get("value").value
        elif item.has("valueFrom"):
            source = [name for name, _ in item.get("valueFrom").leaves()]
            found[item.get("name").text] = Value(f"$({source[0] if source else 'valueFrom'})", item.place)
    return found


def _unseen(container: Node) -> list[Value]:
    return [Value(source.place.path, source.place) for source in container.get("envFrom").items]


def _words(node: Node) -> list[Value]:
    """`command` or `args`: a list of words, or one string for a shell."""
    if isinstance(node.content, str):
        return [Value("sh", node.place), Value("-c", node.place), Value(node.text, node.start)] if node else []
    return [Value(item.text, item.start if item.keeps_lines else item.place) for item in node.items]


def _pod(spec: Node, around: Setting) -> Parts:
    """The engines and routers of a pod's containers."""
    found = Parts()
    sources = {volume.get("name").text: _source(volume) for volume in spec.get("volumes").items}
    shares_host = spec.get("hostIPC").value.is_true
    for container in [*spec.get("containers").items, *spec.get("initContainers").items]:
        mounts = {
            mount.get("mountPath").text: sources.get(mount.get("name").text, f"volume {mount.get('name').text}")
            for mount in container.get("volumeMounts").items
        }
        mine = msgspec.structs.replace(
            around,
            env={**around.env, **_variables(container.get("env"))},
            unseen=[*around.unseen, *_unseen(container)],
            image=container.get("image").value if container.get("image") else around.image,
            mounts=mounts,
            has_shm=around.has_shm or shares_host or "/dev/shm" in mounts,
            shares_host=shares_host,
            place=container.place,
        )
        words = [*_words(container.get("command")), *_words(container.get("args"))]
        if container.get("modelCommand").text == "vllmServe":
            words = [Value("vllm", container.place), Value("serve", container.place), *words]
        found.add(contained(words, mine))
    return found


def _source(volume: Node) -> str:
    for kind, name in (("persistentVolumeClaim", "claimName"), ("hostPath", "path"), ("nfs", "path")):
        if volume.has(kind):
            return f"{kind} {volume.get(kind, name).text}"
    return f"emptyDir of {volume.path}" if volume.has("emptyDir") else f"volume {volume.path}"


def _read_workload(tree: Node, file: str, found: Found) -> None:
    name = _name(tree, os.path.basename(file))
    spec = tree.get("spec")
    pod = next(
        (
            node
            for node in (
                spec.get("template", "spec"),
                spec.get("leaderWorkerTemplate", "leaderTemplate", "spec"),
                spec.get("leaderWorkerTemplate", "workerTemplate", "spec"),
                spec,
            )
            if node.has("containers")
        ),
        None,
    )
    labels = [*tree.get("metadata", "labels").leaves(), *spec.get("template", "metadata", "labels").leaves()]
    said = [value.text for label, value in labels if "role" in label]
    around = Setting(
        name=name,
        where=Where(f"{file}:{name}"),
        place=tree.place,
        role=role_of(*said) or role_of(name),
        replicas=_count(spec.get("replicas")),
    )
    parts = _pod(pod, around) if pod is not None else Parts()
    if parts == Parts():
        found.skipped.append(Skipped(tree.place, f"{tree.get('kind').text} {name} starts no engine that doctor knows"))
    found.parts.add(parts)


def _read_config_map(tree: Node, file: str, found: Found) -> None:
    """LMCache's settings may stand in one, or scripts that pods run; the rest is not examined."""
    started = Parts()
    for name, node in tree.get("data").mapping.items():
        if name.endswith(".sh"):
            around = Setting(
                name=name,
                where=Where(f"{file}:{_name(tree, file)}/{name}"),
                place=node.start,
                role=role_of(name),
                has_shm=True,
                unseen=[Value("variables of the pod that runs it", node.place)],
            )
            started.add(script(Value(node.text, node.start if node.keeps_lines else node.place), around))
    if started != Parts():
        found.parts.add(started)
        return
    for name, node in tree.get("data").mapping.items():
        if not name.endswith((".yaml", ".yml")):
            continue
        try:
            inner = embedded(node.text, node.start, keeps_lines=node.keeps_lines)
        except ConfigError:
            continue
        if _LMCACHE_FILE & set(inner.mapping):
            found.lmcache[name] = {key: child.value for key, child in inner.mapping.items()}
            return
    found.skipped.append(
        Skipped(tree.place, f"ConfigMap {_name(tree, file)} holds neither LMCache's settings nor engines")
    )


# ---- Kthena


def _read_model_booster(tree: Node, file: str, found: Found) -> None:
    name = _name(tree, os.path.basename(file))
    spec = tree.get("spec")
    for backend in [spec.get("backend"), *spec.get("backends").items]:
        if not backend:
            continue
        is_split = backend.get("type").text == "vLLMDisaggregated"
        deployment = Deployment(name=name, kind="Kthena ModelBooster", place=tree.place)
        for worker in backend.get("workers").items:
            kind = worker.get("type").text
            around = Setting(
                name=kind or "worker",
                where=Where(f"{file}:{name}/{kind}"),
                place=worker.place,
                role=role_of(kind),
                env={**_variables(backend.get("env")), **_variables(worker.get("env"))},
                image=worker.get("image").value if worker.get("image") else None,
                mounts={"/": backend.get("cacheURI").text} if backend.get("cacheURI") else {},
                unseen=_unseen(backend),
                replicas=_count(worker.get("replicas")),
            )
            flags = {
                key.replace("-", "_"): Value(node.text or "true", node.place)
                for key, node in worker.get("config").mapping.items()
                if not isinstance(node.content, dict | list)
            }
            if backend.get("modelURI"):
                flags["model"] = backend.get("modelURI").value
            deployment.instances.append(engine_of(flags, around, _booster_connector(worker.get("config"))))
        if is_split:
            deployment.routers += [_booster_router(deployment, tree)]
        found.deployments.append(deployment)


def _booster_connector(config: Node) -> Connector | None:
    node = next((config.get(name) for name in ("kv-transfer-config", "kv_transfer_config") if config.has(name)), None)
    if node is None:
        return None
    if node.mapping:
        connector = connector_at(node)
        connector.problem = "Kthena wants a JSON string here, not a mapping"
        return connector
    connector = connector_of(Value(node.text, node.start), keeps_lines=node.keeps_lines)
    connector.place = node.place
    return connector


def _booster_router(deployment: Deployment, tree: Node) -> Router:
    """The ModelServer that Kthena's controller makes: its kvConnector follows from prefill's connector."""
    for instance in deployment.instances:
        if instance.connector and (speaks := KTHENA_CONNECTORS.get(instance.connector.name)):
            evidence = instance.connector.evidence
            return Router(kind="kthena", speaks=Value(speaks, evidence.place), place=evidence.place, is_derived=True)
    return Router(kind="kthena", speaks=Value("http", tree.place), place=tree.place, is_derived=True)


def _read_model_serving(tree: Node, file: str, found: Found) -> None:
    name = _name(tree, os.path.basename(file))
    parts = Parts()
    for role in tree.get("spec", "template", "roles").items:
        role_name = role.get("name").text
        labels = [value.text for _, value in role.get("entryTemplate", "metadata", "labels").leaves()]
        around = Setting(
            name=f"{name}/{role_name}",
            where=Where(f"{file}:{name}/{role_name}"),
            place=role.place,
            role=role_of(role_name) or role_of(*labels),
            replicas=_count(role.get("replicas")),
        )
        parts.add(_pod(role.get("entryTemplate", "spec"), around))
    if parts == Parts():
        found.skipped.append(Skipped(tree.place, f"ModelServing {name} starts no engine that doctor knows"))
    found.parts.add(parts)


def _read_model_server(tree: Node, file: str, found: Found) -> None:
    spec = tree.get("spec")
    is_fragment = not tree.has("kind")
    if spec.get("inferenceEngine").text == "SGLang":
        found.skipped.append(Skipped(tree.place, "a ModelServer for SGLang: doctor examines vLLM"))
    elif spec.get("workloadSelector").has("pdGroup") or is_fragment:
        connector = spec.get("kvConnector", "type")
        found.parts.routers.append(
            Router(
                kind="kthena",
                speaks=connector.value if connector else Value("http", spec.place),
                place=(connector or spec).place,
                timeout_s=_seconds(spec.get("trafficPolicy", "timeout")),
            )
        )


def _seconds(node: Node) -> Value | None:
    """A duration such as 10s or 1m30s, in whole seconds."""
    if not (match := re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", node.text)) or not node.text:
        return None
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return Value(str(hours * 3600 + minutes * 60 + seconds), node.place)


# ---- KServe and llm-d


def _read_llm_inference_service(tree: Node, file: str, found: Found) -> None:
    name = _name(tree, os.path.basename(file))
    spec = tree.get("spec")
    deployment = Deployment(name=name, kind="KServe LLMInferenceService", place=tree.place)
    is_split = spec.has("prefill")
    roles = [(Role.DECODE if is_split else None, spec)]
    if is_split:
        roles.append((Role.PREFILL, spec.get("prefill")))
    for role, part in roles:
        label = role or "server"
        around = Setting(
            name=label,
            where=Where(f"{file}:{name}/{label}"),
            place=part.place,
            role=role,
            has_shm=True,  # its own templates mount one
            replicas=_count(part.get("replicas")),
            unseen=[item.value for item in spec.get("baseRefs").items],
        )
        parts = _kserve_parts(part, around, spec)
        deployment.instances += parts.instances
        deployment.routers += parts.routers
        deployment.services += parts.services
    if is_split and not deployment.routers:
        speaks = Value("nixlv2", spec.get("prefill").place)
        deployment.routers.append(Router(kind="llm-d", speaks=speaks, place=speaks.place, is_derived=True))
    found.deployments.append(deployment)


def _kserve_parts(part: Node, around: Setting, spec: Node) -> Parts:
    """KServe starts `vllm serve` in the container `main` and adds to its arguments; other containers are their own."""
    template = part.get("template")
    found = _pod(template, around)
    main = next((item for item in template.get("containers").items if item.get("name").text == "main"), template)
    mine = msgspec.structs.replace(
        around,
        env=_variables(main.get("env")),
        unseen=[*around.unseen, *_unseen(main)],
        image=main.get("image").value if main.get("image") else None,
        place=main.place,
    )
    arguments = _words(main.get("args"))
    started = run([*_words(main.get("command")), *arguments], mine).instances
    instance = started[0] if started else engine(arguments, mine)
    if tensor := (part.get("parallelism") or spec.get("parallelism")).get("tensor"):
        instance.flags.setdefault("tensor_parallel_size", tensor.value)
    if model := spec.get("model", "uri"):
        instance.flags.setdefault("model", model.value)
    if instance.connector is None and spec.has("kvCacheOffloading"):
        instance.connector = _kserve_offloading(spec.get("kvCacheOffloading"))
    return Parts(instances=[instance], routers=found.routers, services=found.services)


def _kserve_offloading(node: Node) -> Connector:
    extra = {
        f"secondary_tiers[{i}].type": Value("fs", item.place) for i, item in enumerate(node.get("secondary").items)
    }
    fields = {"kv_connector": Value("OffloadingConnector", node.place), "kv_role": Value("kv_both", node.place)}
    return Connector(place=node.place, fields=fields, extra=extra)


def _read_llm_d_values(tree: Node, file: str, found: Found) -> None:
    name = tree.get("modelArtifacts", "name").text or os.path.basename(file)
    deployment = Deployment(name=name, kind="llm-d values", place=tree.place)
    for role in (Role.PREFILL, Role.DECODE):
        part = tree.get(role)
        if not part or part.get("create").text.lower() == "false":
            continue
        around = Setting(name=role, where=Where(f"{file}:{role}"), place=part.place, role=role)
        around.replicas = _count(part.get("replicas"))
        parts = _pod(part, around)
        for instance in parts.instances:
            if size := part.get("parallelism", "tensor"):
                instance.flags.setdefault("tensor_parallel_size", size.value)
            if model := tree.get("modelArtifacts", "name"):
                instance.flags.setdefault("model", model.value)
        deployment.instances += parts.instances
        deployment.routers += parts.routers
    proxy = tree.get("routing", "proxy")
    if not deployment.routers and proxy.get("enabled").text.lower() != "false":
        connector = proxy.get("connector")
        speaks = connector.value if connector else Value("nixlv2", (proxy or tree).place)
        deployment.routers.append(Router(kind="llm-d", speaks=speaks, place=speaks.place))
    _keep(deployment, found, "holds no engine that doctor knows")


def _keep(deployment: Deployment, found: Found, why_not: str) -> None:
    if deployment.instances:
        found.deployments.append(deployment)
    else:
        found.skipped.append(Skipped(deployment.place, f"{deployment.kind}: {why_not}"))


# ---- production-stack

_PRODUCTION_STACK = {
    "maxModelLen": "max_model_len",
    "dtype": "dtype",
    "tensorParallelSize": "tensor_parallel_size",
    "maxNumSeqs": "max_num_seqs",
}


def _read_production_stack(tree: Node, file: str, found: Found) -> None:
    deployment = Deployment(name=os.path.basename(file), kind="production-stack values", place=tree.place)
    router = tree.get("routerSpec")
    arguments = [item.text for item in router.get("extraArgs").items]
    labels = {
        role: set(arguments[arguments.index(option) + 1].split(","))
        for role, option in ((Role.PREFILL, "--prefill-model-labels"), (Role.DECODE, "--decode-model-labels"))
        if option in arguments[:-1]
    }
    for model in tree.get("servingEngineSpec", "modelSpec").items:
        deployment.instances.append(_production_stack_engine(model, tree, file, labels))
    logic = router.get("routingLogic")
    if deployment.instances and (logic or router):
        speaks = logic.value if logic else Value("roundrobin", router.place)
        deployment.routers.append(Router(kind="production-stack", speaks=speaks, place=speaks.place))
        if router.get("enablePD").value.is_true:
            deployment.routers[-1].speaks = Value(f"{speaks.text} with enablePD", speaks.place)
    _keep(deployment, found, "holds no engine")


def _production_stack_engine(model: Node, tree: Node, file: str, labels: dict[Role, set[str]]) -> Instance:
    name = model.get("name").text
    label = model.get("labels", "model").text or name
    role = next((role for role, wanted in labels.items() if label in wanted), None)
    config, lmcache = model.get("vllmConfig"), model.get("lmcacheConfig")
    env = {"PYTHONHASHSEED": Value("123", model.place), **_variables(model.get("env"))}  # the chart sets it
    is_lmcache = lmcache.get("enabled").value.is_true
    if is_lmcache and tree.get("cacheserverSpec", "enabled").value.is_true:
        env.setdefault("LMCACHE_REMOTE_URL", Value("lm://cache-server", tree.get("cacheserverSpec").place))
    if is_lmcache and lmcache.get("enablePD").value.is_true:
        env["LMCACHE_ENABLE_PD"] = lmcache.get("enablePD").value
    around = Setting(
        name=name,
        where=Where(f"{file}:{name}"),
        place=model.place,
        role=role or role_of(name),
        env=env,
        image=Value(f"{model.get('repository').text}:{model.get('tag').text}", model.get("tag").place),
        has_shm=config.has("tensorParallelSize"),  # the chart mounts one then
        replicas=_count(model.get("replicaCount")),
    )
    flags = {flag: config.get(key).value for key, flag in _PRODUCTION_STACK.items() if config.has(key)}
    words = [Value("vllm", model.place), Value("serve", model.place), *_words(config.get("extraArgs"))]
    instance = run(words, around).instances[0]
    instance.flags = {"model": model.get("modelURL").value, **flags, **instance.flags}
    if is_lmcache and instance.connector is None:
        said = lmcache.get("kvRole")
        kv_role = said.value if said else Value("kv_both", lmcache.place)
        fields = {"kv_connector": Value("LMCacheConnectorV1", lmcache.place), "kv_role": kv_role}
        instance.connector = Connector(place=lmcache.place, fields=fields)
        instance.role = around.role or role_of(kv_role.text) or Role.BOTH
    return instance


# ---- compose, kvtally, plain settings


def _read_compose(tree: Node, file: str, found: Found) -> None:
    deployment = Deployment(name=os.path.basename(file), kind="compose file", place=tree.place)
    for name, service in tree.get("services").mapping.items():
        is_host = service.get("network_mode").text == "host"
        mounts = {}
        for volume in service.get("volumes").items:
            source, _, target = volume.text.partition(":")
            mounts[target.partition(":")[0]] = f"volume {source}"
        shares_host = service.get("ipc").text in ("host", "shareable") or service.get("ipc").text.startswith("service:")
        around = Setting(
            name=name,
            where=Where(f"{file} host" if is_host else f"{file}:{name}"),
            place=service.place,
            role=role_of(name),
            env=_variables(service.get("environment")),
            image=service.get("image").value if service.get("image") else None,
            has_shm=service.has("shm_size") or shares_host or "/dev/shm" in mounts,
            shares_host=shares_host,
            mounts=mounts,
            unseen=[service.get("env_file").value] if service.has("env_file") else [],
        )
        words = [*_words(service.get("entrypoint")), *_compose_command(service.get("command"))]
        parts = contained(words, around)
        deployment.instances += parts.instances
        deployment.routers += parts.routers
        deployment.services += parts.services
    _keep(deployment, found, "no service starts an engine that doctor knows")


def _compose_command(node: Node) -> list[Value]:
    """A string is split into words as a shell would, but no shell runs it."""
    if not isinstance(node.content, str):
        return _words(node)
    place = node.start if node.keeps_lines else node.place
    return [word for command in commands(node.text, place) for word in command.words]


def _read_up(tree: Node, file: str, found: Found) -> None:
    """`kvtally up`: one router, every engine with a store on its machine. Stores of several machines pull from each
    other, so to the rules they are one."""
    deployment = Deployment(name=os.path.basename(file), kind="kvtally up file", place=tree.place)
    where = Where(f"{file} host")
    nodes = tree.get("nodes").mapping
    sections = [(f"{node} ", section) for node, section in nodes.items()] if nodes else [("", tree)]
    roles = (("prefill", Role.PREFILL), ("decode", Role.DECODE), ("plain", Role.BOTH))
    for (prefix, section), (name, role) in product(sections, roles):
        pool = section.get(name)
        count = (pool.get("count") if pool.mapping else pool).value.number
        if not pool or count == 0:
            continue
        layers = [tree, *([section] if nodes else []), pool]  # the later ones win
        flags = {"model": (section if section.has("model") else tree).get("model").value}
        for arguments in (layer.get("args") for layer in layers):
            flags |= {
                key.lstrip("-").replace("-", "_"): child.value
                for key, child in arguments.mapping.items()
                if not isinstance(child.content, dict | list)
            }
        env = {name: value for layer in layers for name, value in _variables(layer.get("env")).items()}
        around = Setting(name=f"{prefix}{name}", where=where, place=pool.place, role=role, env=env, has_shm=True)
        around.replicas = count or 1
        fields = {"kv_connector": Value("KVTally", tree.place), "kv_role": Value("kv_both", tree.place)}
        deployment.instances.append(engine_of(flags, around, Connector(place=tree.place, fields=fields)))
    if deployment.is_disaggregated:
        router = tree.get("router")
        deployment.routers.append(
            Router(kind="kvtally", speaks=Value("kvtally", (router or tree).place), place=(router or tree).place)
        )
    deployment.services.append(Service(kind="kvtally store", flags={}, where=where, place=tree.get("store").place))
    _keep(deployment, found, "it asks for no engine")


def _read_transfer_config(tree: Node, file: str, found: Found) -> None:
    name = os.path.basename(file)
    around = Setting(name=name, where=Where(file, is_certain=False), place=tree.place, role=role_of(name), has_shm=True)
    found.parts.instances.append(engine_of({}, around, connector_at(tree)))


def _read_engine_file(tree: Node, file: str, found: Found) -> None:
    """vLLM's own file of options: `vllm serve --config FILE`."""
    name = os.path.basename(file)
    around = Setting(name=name, where=Where(file, is_certain=False), place=tree.place, role=role_of(name), has_shm=True)
    flags = {
        key.replace("-", "_"): child.value
        for key, child in tree.mapping.items()
        if not isinstance(child.content, dict | list)
    }
    node = next((tree.get(key) for key in ("kv-transfer-config", "kv_transfer_config") if tree.has(key)), None)
    connector = connector_at(node) if node is not None and node.mapping else None
    found.parts.instances.append(engine_of(flags, around, connector))


def _read_lmcache_file(tree: Node, file: str, found: Found) -> None:
    found.lmcache[os.path.basename(file)] = {key: child.value for key, child in tree.mapping.items()}


Reader = Callable[[Node, str, Found], None]

_KINDS: dict[str, Reader] = {
    "ModelBooster": _read_model_booster,
    "ModelServing": _read_model_serving,
    "ModelServer": _read_model_server,
    "LLMInferenceService": _read_llm_inference_service,
    "ConfigMap": _read_config_map,
}
# Files without a kind, by what they hold; the first that fits.
_SHAPES: list[tuple[Callable[[Node], bool], Reader]] = [
    (lambda tree: tree.has("kv_connector"), _read_transfer_config),
    (lambda tree: tree.has("kv-transfer-config") or tree.has("kv_transfer_config"), _read_engine_file),
    (lambda tree: tree.has("servingEngineSpec"), _read_production_stack),
    (lambda tree: tree.has("modelArtifacts") or tree.get("decode").has("containers"), _read_llm_d_values),
    (lambda tree: bool(tree.get("services").mapping), _read_compose),
    (lambda tree: tree.has("model") and bool({"prefill", "decode", "plain", "nodes"} & set(tree.mapping)), _read_up),
    (lambda tree: tree.get("spec").has("kvConnector"), _read_model_server),
    (lambda tree: bool(_LMCACHE_FILE & set(tree.mapping)), _read_lmcache_file),
]
