#!/bin/bash
# The first process of the container of `Containerfile`. torchrun takes the place of this shell, hands SIGTERM on to the
# processes, and waits 30 s for them to save. (The `deepspeed` command as first process would ignore the signal.)

exec torchrun --standalone --nproc_per_node "${PROCESSES:-1}" -m deepnmt train "$@"
