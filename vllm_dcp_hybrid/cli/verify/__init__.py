# SPDX-License-Identifier: Apache-2.0
"""`verify`: is DCP right for this model on this machine?

The parts, from the bottom: `bounds` (arithmetic), `model` and `recall` (what the model's files say), `work` (what is
asked), `asking` (of a server), `measure` (answers to differences), `engine` (command lines), `report` (looks),
`command` (the order of things).
"""
