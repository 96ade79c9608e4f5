_run_and_time() {
    local verb= word words
    for word in "${COMP_WORDS[@]:1:$((COMP_CWORD - 1))}"; do
        case $word in @VERBS@) verb=$word; break ;; esac
    done
    [[ -n $verb || $COMP_CWORD -lt 2 ]] || case ${COMP_WORDS[1]} in @BENCHMARKS@) [[ ${COMP_WORDS[2]} != -* ]] || verb=run ;; esac
    case $verb in
@CASES@
        *) words='@FIRST@' ;;
    esac
    # shellcheck disable=SC2207 # zsh has another mapfile, and no word has a space
    COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _run_and_time run_and_time.sh ./run_and_time.sh
