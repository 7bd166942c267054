#!/bin/bash
# Two machines on one, for cluster.py: `machines.sh overlay SCRATCH SHARED`, started in mount and PID namespaces of
# their own. All that is installed or written stays in an overlay of the root file system on a tmpfs. Prints "ready".
set -e

overlay() { # SCRATCH, an empty folder; SHARED, a folder that the machines and the caller share
    local scratch=$1 shared=$2 root=$1/root folder
    mount -t tmpfs -o size=2g tmpfs "$scratch"
    mkdir "$scratch/upper" "$scratch/work" "$root"
    mount -t overlay overlay -o "lowerdir=/,upperdir=$scratch/upper,workdir=$scratch/work" "$root"
    mount -t proc proc "$root/proc"
    mount -t sysfs sysfs "$root/sys"
    mount --rbind /dev "$root/dev"
    mount -t tmpfs tmpfs "$root/run"
    for folder in "${@:3}"; do # what does not lie on the root file system
        mkdir -p "$root$folder"
        mount --bind "$folder" "$root$folder"
    done
    mkdir -p "$root$shared"
    mount --bind "$shared" "$root$shared"
    exec chroot "$root" "$0" machines "$shared"
}

machines() { # SHARED
    cd /
    export DEBIAN_FRONTEND=noninteractive PATH=$PATH:/usr/sbin:/sbin
    mkdir -p /run/lock /run/munge /run/netns /run/sshd
    if ! { type slurmctld && type slurmd && type srun && type munged && type pdsh && type sshd && type ip; } &> /dev/null; then
        printf '#!/bin/sh\nexit 101\n' > /usr/sbin/policy-rc.d # starts no service
        chmod +x /usr/sbin/policy-rc.d
        { apt-get update -qq && apt-get install -qq -y --no-install-recommends -o Dpkg::Use-Pty=0 -o DPkg::Options::=--force-unsafe-io \
            slurmctld slurmd slurm-client munge pdsh openssh-server iproute2; } > /var/log/install 2>&1 ||
            { echo "no packages: $(tail -n 1 /var/log/install)"; exit 3; }
    fi
    printf '127.0.0.1 localhost\n10.77.0.1 n1\n10.77.0.2 n2\n' > /etc/hosts
    rm -f /etc/hostname
    mkdir -p /etc/slurm /var/log/slurm /var/spool/ctl
    cat > /etc/slurm/slurm.conf <<'CONF'
ClusterName=two
SlurmctldHost=n1
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
StateSaveLocation=/var/spool/ctl
SlurmdSpoolDir=/var/spool/slurmd-%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd-%n.pid
SlurmctldLogFile=/var/log/slurm/ctld.log
SlurmdLogFile=/var/log/slurm/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
KillWait=30
SchedulerParameters=sched_interval=1
GresTypes=gpu
NodeName=n[1-2] CPUs=2 RealMemory=4000 Gres=gpu:2 State=UNKNOWN
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
CONF
    printf 'Name=gpu File=/dev/zero\nName=gpu File=/dev/full\n' > /etc/slurm/gres.conf
    printf 'CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nCgroupMountpoint=/var/spool/no-cgroup\n' > /etc/slurm/cgroup.conf
    mkdir -p /var/spool/no-cgroup
    chown munge: /run/munge
    [ -s /etc/munge/munge.key ] || { dd if=/dev/urandom of=/etc/munge/munge.key bs=1 count=128 status=none; chown munge: /etc/munge/munge.key; chmod 400 /etc/munge/munge.key; }
    su -s /bin/sh munge -c /usr/sbin/munged 2> /dev/null
    export HOME=/root
    mkdir -p /root/.ssh
    chmod 700 /root/.ssh
    ssh-keygen -A > /dev/null
    rm -f /root/.ssh/id_ed25519*
    ssh-keygen -q -t ed25519 -N '' -f /root/.ssh/id_ed25519
    cp /root/.ssh/id_ed25519.pub /root/.ssh/authorized_keys
    printf 'Host *\n StrictHostKeyChecking no\n UserKnownHostsFile /dev/null\n LogLevel ERROR\n' > /root/.ssh/config
    chmod 600 /root/.ssh/*
    local n
    for n in 1 2; do ip netns add n$n; done
    ip link add v1 netns n1 type veth peer name v2 netns n2
    for n in 1 2; do
        ip -n n$n link set v$n name eth0
        ip -n n$n addr add 10.77.0.$n/24 dev eth0
        ip -n n$n link set eth0 up
        ip -n n$n link set lo up
    done
    for n in 1 2; do
        ip netns exec n$n unshare --uts --mount --pid --fork --kill-child "$0" node n$n > /var/log/node-n$n 2>&1 < /dev/null &
    done
    local tries
    for tries in $(seq 200); do
        [ "$(ip netns exec n1 sinfo -h -N -t idle -o %N 2> /dev/null | wc -l)" = 2 ] && break
        [ "$tries" = 200 ] && { echo "Slurm does not start: $(tail -n 2 /var/log/slurm/*.log)"; exit 4; }
        sleep 0.1
    done
    echo ready
    sleep infinity
}

node() { # NAME
    hostname "$1"
    mount --make-rprivate /
    mount -t proc proc /proc
    /usr/sbin/sshd -o UsePAM=no
    [ "$1" = n1 ] && slurmctld
    slurmd -N "$1"
    sleep infinity
}

"$@"
