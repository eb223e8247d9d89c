# SPDX-License-Identifier: Apache-2.0
"""The worker side: block tables, slot mapping, and what is checked on the model's layers before weights load."""
