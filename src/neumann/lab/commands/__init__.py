"""The command `neumann`.

main             run the command line and turn errors into exit codes
summaries        the commands, and the help that lists them
settings_source  the settings of a command, read without importing torch
flags            its flags, made from these
flag_help        the help of a command: its flags in groups
flag_check       what is wrong with a flag, before anything is imported that takes long
flag_advice      what an unknown flag was probably meant to be
parser           flags and --config files
arm_list         the optimizers, a line each
progress         progress bars and log lines
terminal         tables and sentences at the width of the terminal
tables           the tables of a comparison and a search
arm_legend       short names of arms, and what they stand for
demo_verdict     the demo's result in one sentence
train, compare, sweep, study, spectrum, report, demo   one module for each subcommand
"""
