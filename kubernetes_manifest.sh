#!/usr/bin/env bash
# Print a Kubernetes manifest: DGXSYSTEM=H200_2x8 CONT=registry/image:tag DATADIR=/data ./kubernetes_manifest.sh <benchmark> [options] | kubectl apply -f -
# DGXSYSTEM names a config, and thus the number of nodes and of GPUs on each. One node: a Job. Several: a JobSet (jobset.sigs.k8s.io), which
# gives the pods stable names, so that they find node 0. DATADIR, MODEL and LOGDIR are directories of the nodes; change `hostPath` to
# `persistentVolumeClaim` where the cluster has shared volumes. docs/clusters.md says more.
#   CONT        image that the cluster can pull
#   GPU_VENDOR  amd or nvidia (default: by the GPU's name in DGXSYSTEM)
#   JOB_NAME    name of the job (default: llama-training)
set -euo pipefail

fail() { # what, why, what to do
    printf 'error: %s\n  why: %s\n  do:  %s\n' "$@" >&2
    exit 2
}

[[ $# -gt 0 ]] || fail 'no benchmark was given' 'the pods run one' './kubernetes_manifest.sh <benchmark> [options]'
[[ ${DGXSYSTEM:-} =~ ^([A-Za-z0-9]+)_([1-9][0-9]*)x([1-9][0-9]*)$ ]] ||
    fail "DGXSYSTEM=${DGXSYSTEM:-}" 'it gives the number of nodes and GPUs' 'set it to the name of a config, such as H200_2x8'
gpu=${BASH_REMATCH[1]} nodes=${BASH_REMATCH[2]} gpus=${BASH_REMATCH[3]}
[[ -n ${CONT:-} ]] || fail 'CONT is not set' 'the cluster pulls the image from a registry' 'set it to REGISTRY/IMAGE:TAG'
for variable in DATADIR LOGDIR; do
    [[ ${!variable:-} == /* ]] || fail "$variable=${!variable:-}" 'it must be a directory of the nodes' "set $variable to an absolute path"
done
vendor=${GPU_VENDOR:-}
if [[ -z $vendor ]]; then
    vendor=nvidia
    [[ $gpu != MI* ]] || vendor=amd
fi
[[ $vendor == amd || $vendor == nvidia ]] || fail "GPU_VENDOR=$vendor" 'known are amd and nvidia' 'correct or unset it'
name=${JOB_NAME:-llama-training}

yaml() { # a text as a YAML string: JSON's escapes are YAML's
    local text=${1//\\/\\\\}
    printf '"%s"' "${text//\"/\\\"}"
}

variables() { # of the container
    local variable
    for variable in SEED NEXP DATADIR MODEL LOGDIR DGXSYSTEM MLPERF_SUBMISSION_ORG MLPERF_SUBMISSION_PLATFORM \
        NCCL_DEBUG NCCL_IB_HCA NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME; do
        [[ -z ${!variable:-} ]] || printf '        - {name: %s, value: %s}\n' "$variable" "$(yaml "${!variable}")"
    done
    if [[ $nodes -gt 1 ]]; then # a JobSet's pods are named <set>-<job>-<job number>-<pod number>, in the domain of the set
        printf '        - {name: MASTER_ADDR, value: "%s-node-0-0.%s"}\n' "$name" "$name"
        printf '        - name: NODE_RANK\n'
        printf '          valueFrom: {fieldRef: {fieldPath: "metadata.annotations['\''batch.kubernetes.io/job-completion-index'\'']"}}\n'
    fi
}

mounts() {
    local variable
    for variable in DATADIR MODEL LOGDIR; do
        [[ -z ${!variable:-} ]] || printf '        - {name: %s, mountPath: %s, readOnly: %s}\n' \
            "${variable,,}" "$(yaml "${!variable}")" "$([[ $variable == LOGDIR ]] && echo false || echo true)"
    done
}

volumes() {
    local variable
    for variable in DATADIR MODEL LOGDIR; do
        [[ -z ${!variable:-} ]] || printf '      - {name: %s, hostPath: {path: %s, type: Directory}}\n' "${variable,,}" "$(yaml "${!variable}")"
    done
}

arguments() {
    local argument
    for argument in "$@"; do printf '        - %s\n' "$(yaml "$argument")"; done
}

job() { # the part that a Job and a JobSet share: one pod for each node
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
      hostNetwork: $([[ $nodes -gt 1 ]] && echo true || echo false) # InfiniBand and RoCE cards belong to the host
      dnsPolicy: $([[ $nodes -gt 1 ]] && echo ClusterFirstWithHostNet || echo ClusterFirst)
      containers:
      - name: launcher
        image: $(yaml "$CONT")
        args:
$(arguments "$@")
        env:
$(variables)
        resources: {limits: {"$vendor.com/gpu": $gpus}}
        securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
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
    job "$@"
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
    job "$@" | sed 's/^/      /'
fi
