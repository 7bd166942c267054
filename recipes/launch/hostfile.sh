#!/bin/bash
# Trains on the machines of the file `hosts`, over pdsh and ssh without a password. Copy `hosts` and `.deepspeed_env`
# into the folder where you start it; that folder, the virtual environment, the data and the run folder must have the
# same path on all machines.
#
#     recipes/launch/hostfile.sh my.yaml parallel.ds_config=ds_configs/zero1.json

deepspeed --hostfile "${HOSTS:-hosts}" --master_port "${MASTER_PORT:-29500}" --module deepnmt train "$@"
code=$?
# DeepSpeed ends with 0 after some kills, while the run still saves, so that only the run folder knows
if [ $code = 0 ]; then
    for _ in {1..600}; do
        said=$(deepnmt status "$@")
        code=$?
        [ $code = 3 ] || break  # it is running
        sleep 1
    done
    echo "$said"
fi
exit $code
