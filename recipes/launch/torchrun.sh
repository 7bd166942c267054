#!/bin/bash
# Trains on several machines under torchrun: start it on each of them, with the address of the first one.
#
#     NODES=2 FIRST=node1 PROCESSES=8 recipes/launch/torchrun.sh my.yaml parallel.ds_config=ds_configs/zero1.json
#
# The processes find each other at FIRST:PORT; which machine is which does not matter.

exec torchrun --nnodes "${NODES:-1}" --nproc_per_node "${PROCESSES:-8}" --rdzv_id "${RUN_ID:-deepnmt}" \
    --rdzv_backend c10d --rdzv_endpoint "${FIRST:-localhost}:${PORT:-29500}" -m deepnmt train "$@"
