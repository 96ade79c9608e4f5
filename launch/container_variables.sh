# shellcheck shell=bash
# Select the environment variables that run_with_docker.sh and kubernetes_manifest.sh pass into a
# container: those of docs/settings.md, and those that configure the GPU libraries. Variables with
# paths of the host are left out, such as PATH, PYTHONPATH and the directories of caches.
is_user_variable() { # name
    case $1 in
        SEED | NEXP | DATADIR | MODEL | LOGDIR | DGXSYSTEM | DGXNGPU | GPU_KIND) ;;
        ATTENTION_ENGINE | MATMUL_ENGINE | SWIGLU_ENGINE | ZERO_STREAM_PRIORITY) ;;
        ALLOW_KNOWN_ISSUES | NO_COLOR | RUN_QUIET | OMP_WAIT_POLICY | GPU_MAX_HW_QUEUES) ;;
        WANDB_PROJECT | MLFLOW_EXPERIMENT_NAME | MLFLOW_TRACKING_URI | TRACKIO_PROJECT) ;;
        FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED | AITER_JIT_DIR) ;;
        MLPERF_SUBMISSION_* | NCCL_* | RCCL_* | GLOO_* | TORCH_NCCL_* | TORCH_FR_*) ;;
        TORCH_ROCM_* | PYTORCH_* | HSA_* | AMDGCN_* | HIPBLASLT_*) ;;
        *) return 1 ;;
    esac
}
