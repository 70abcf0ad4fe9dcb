"""The command `neumann`.

main          run the command line and turn errors into exit codes
summaries     the commands, and the help that lists them
parser        flags and --config files
flag_help     the help of a command: its flags in groups
arm_list      the optimizers, a line each
progress      progress bars and log lines
tables        tables in the terminal
demo_verdict  the demo's result in one sentence
train, compare, sweep, study, spectrum, report, demo   one module for each subcommand
"""
