# SPDX-License-Identifier: Apache-2.0
"""The API process: the ``--enable-plugin`` flag, and what is refused while the configuration is built."""
