"""A row's prompt as token ids: from columns, templates, conversations, batch-file lines or scored texts."""
