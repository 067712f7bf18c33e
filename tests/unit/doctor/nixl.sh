#!/usr/bin/env bash
# Prefill and decode on one machine, NIXL between them, and vLLM's own example proxy.
set -euo pipefail
MODEL=${MODEL:-Qwen/Qwen3-0.6B}
KV='{"kv_connector": "NixlConnector",
     "kv_role": "kv_both"}'
export VLLM_LOGGING_LEVEL=INFO

CUDA_VISIBLE_DEVICES=0 VLLM_NIXL_SIDE_CHANNEL_PORT=5600 \
  vllm serve "$MODEL" --port 8100 \
    --kv-transfer-config "$KV" > prefill.log 2>&1 &

CUDA_VISIBLE_DEVICES=1 VLLM_NIXL_SIDE_CHANNEL_PORT=5700 \
  vllm serve "$MODEL" --port 8200 \
    --kv-transfer-config "$KV" > decode.log 2>&1 &

cat <<'END'
vllm serve nothing --kv-transfer-config 'this is text'
END
python3 toy_proxy_server.py --port 8192 --prefiller-ports 8100 --decoder-ports 8200
