#!/usr/bin/env bash
# Print a Kubernetes manifest for a run:
#
#   DGXSYSTEM=H200_2x8 CONT=registry/image:tag DATADIR=/data LOGDIR=/results \
#       ./kubernetes_manifest.sh <benchmark> [options] | kubectl apply -f -
#
# The manifest is a Job for one node, and a JobSet (jobset.sigs.k8s.io) for several nodes, whose pods
# then have stable names, by which they find node 0. See docs/clusters.md.
#
#   DGXSYSTEM   name of a config, which gives the number of nodes and of GPUs on each
#   CONT        image that the cluster can pull
#   DATADIR, MODEL, LOGDIR
#               directories of the nodes; where the cluster has shared volumes, change `hostPath` in
#               the manifest to `persistentVolumeClaim`
#   GPU_VENDOR  amd or nvidia (default: by the GPU's name in DGXSYSTEM)
#   JOB_NAME    name of the job (default: llama-training)
#   RDMA_RESOURCE
#               for several nodes: name and number of the devices of each pod for RDMA, as the
#               cluster's device plugin calls them, such as rdma/hca:1 or nvidia.com/hostdev:8.
#               Without them, NCCL and RCCL fall back to TCP
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    # Print the comment at the top of this file.
    sed -n -e '1,/^set /s/^# //p' -e '1,/^set /s/^#$//p' "${BASH_SOURCE[0]}"
    exit 0
fi
root=$(cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd -P)

refused=
refuse() { # what, why, what to do
    printf 'error: %s\n  why: %s\n  do:  %s\n' "$@" >&2
    refused=yes
}

if [[ $# -eq 0 ]]; then
    refuse 'no benchmark given' 'the pods need one to run' \
        './kubernetes_manifest.sh <benchmark> [options]'
fi
if [[ ! ${DGXSYSTEM:-} =~ ^([A-Za-z0-9]+)_([1-9][0-9]*)x([1-9][0-9]*)$ ]]; then
    refuse "DGXSYSTEM is not the name of a config: '${DGXSYSTEM:-}'" \
        'it must give the number of nodes and GPUs' 'set it to a name such as H200_2x8'
fi
gpu=${BASH_REMATCH[1]:-}
nodes=${BASH_REMATCH[2]:-}
gpus=${BASH_REMATCH[3]:-}
if [[ -z ${CONT:-} ]]; then
    refuse 'CONT is not set' 'the cluster pulls the image from a registry' \
        'set it to REGISTRY/IMAGE:TAG'
fi
for variable in DATADIR LOGDIR ${MODEL:+MODEL}; do
    if [[ ${!variable:-} != /* ]]; then
        refuse "$variable is not an absolute path: '${!variable:-}'" \
            'it must be a directory of the nodes' \
            "set $variable to an absolute path"
    fi
done
vendor=${GPU_VENDOR:-}
if [[ -z $vendor ]]; then
    vendor=nvidia
    [[ $gpu != MI* ]] || vendor=amd
fi
if [[ $vendor != amd && $vendor != nvidia ]]; then
    refuse "unknown GPU_VENDOR: $vendor" 'known are amd and nvidia' 'correct or unset it'
fi
name=${JOB_NAME:-llama-training}
passed=$(python3 -I "$root/common/variables.py" POD) ||
    refuse 'cannot tell which variables the container needs' \
        'python3 could not run common/variables.py' \
        'install Python 3.8 or newer, and put it on PATH'

# Print a text as a YAML string, with the escapes of JSON.
yaml() { # text
    local text=${1//\\/\\\\}
    text=${text//$'\n'/\\n}
    printf '"%s"' "${text//\"/\\\"}"
}

# Print the environment variables of the container.
variables() {
    local variable
    local index="metadata.annotations['batch.kubernetes.io/job-completion-index']"
    for variable in $passed; do
        printf '        - {name: %s, value: %s}\n' "$variable" "$(yaml "${!variable}")"
    done
    if [[ $nodes -gt 1 ]]; then
        # The first pod of the JobSet: <set>-<job>-<job number>-<pod number>.<set>
        printf '        - {name: MASTER_ADDR, value: "%s-node-0-0.%s"}\n' "$name" "$name"
        printf '        - name: NODE_RANK\n'
        printf '          valueFrom: {fieldRef: {fieldPath: "%s"}}\n' "$index"
    fi
}

# Print the mounts of the container.
mounts() {
    local variable
    local read_only
    for variable in DATADIR MODEL LOGDIR; do
        if [[ -n ${!variable:-} ]]; then
            read_only=true
            [[ $variable != LOGDIR ]] || read_only=false
            printf '        - {name: %s, mountPath: %s, readOnly: %s}\n' \
                "${variable,,}" "$(yaml "${!variable}")" "$read_only"
        fi
    done
}

# Print the volumes of the pod.
volumes() {
    local variable
    for variable in DATADIR MODEL LOGDIR; do
        if [[ -n ${!variable:-} ]]; then
            printf '      - {name: %s, hostPath: {path: %s, type: Directory}}\n' \
                "${variable,,}" "$(yaml "${!variable}")"
        fi
    done
}

# Print the arguments of the container.
arguments() { # arguments of kubernetes_manifest.sh
    local argument
    for argument in "$@"; do
        printf '        - %s\n' "$(yaml "$argument")"
    done
}

# InfiniBand and RoCE cards belong to the host's network. RDMA locks the memory that it registers. A
# manifest cannot raise memlock. The capability lifts it, but only of root: the kernel takes it from
# other users when the container starts.
host_network=false
dns_policy=ClusterFirst
limits="\"$vendor.com/gpu\": $gpus"
security='allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}'
if [[ $nodes -gt 1 ]]; then
    host_network=true
    dns_policy=ClusterFirstWithHostNet
    if [[ -z ${RDMA_RESOURCE:-} ]]; then
        echo 'note: RDMA_RESOURCE is not set: NCCL and RCCL will use TCP between the nodes' >&2
    elif [[ $RDMA_RESOURCE =~ ^([A-Za-z0-9./_-]+):([1-9][0-9]*)$ ]]; then
        limits+=", \"${BASH_REMATCH[1]}\": ${BASH_REMATCH[2]}"
        security='runAsUser: 0, allowPrivilegeEscalation: false,'
        security+=' capabilities: {drop: [ALL], add: [IPC_LOCK]}'
    else
        refuse "RDMA_RESOURCE is not NAME:COUNT: '$RDMA_RESOURCE'" \
            'it names the RDMA devices of a pod' 'set it to a value such as rdma/hca:1'
    fi
fi
[[ -z $refused ]] || exit 2

# Print the `spec` that a Job and a JobSet have in common: one pod for each node.
job_spec() { # arguments of kubernetes_manifest.sh
    cat << YAML
spec:
  completions: $nodes
  parallelism: $nodes
  completionMode: Indexed
  backoffLimit: 0 # a run that failed is not repeated: its clock cannot start again
  template:
    spec:
      restartPolicy: Never
      terminationGracePeriodSeconds: 120 # on SIGTERM the log gets its run_stop
      hostNetwork: $host_network # InfiniBand and RoCE cards belong to the host
      dnsPolicy: $dns_policy
      containers:
      - name: launcher
        image: $(yaml "$CONT")
        args:
$(arguments "$@")
        env:
$(variables)
        resources: {limits: {$limits}}
        securityContext: {$security}
        volumeMounts:
        - {name: shm, mountPath: /dev/shm}
$(mounts)
      volumes:
      - {name: shm, emptyDir: {medium: Memory, sizeLimit: 16Gi}} # the ranks' collectives
$(volumes)
YAML
}

if [[ $nodes == 1 ]]; then
    printf 'apiVersion: batch/v1\nkind: Job\nmetadata: {name: %s}\n' "$(yaml "$name")"
    job_spec "$@"
else
    cat << YAML
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {name: $(yaml "$name")}
spec:
  failurePolicy: {maxRestarts: 0}
  network: {enableDNSHostnames: true, publishNotReadyAddresses: true}
  replicatedJobs:
  - name: node
    replicas: 1
    template:
YAML
    job_spec "$@" | sed 's/^/      /'
fi
