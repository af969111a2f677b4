{{/* The flag of a service whose clients need keys: CELL. */}}
{{- define "lockstep.keysFlag" -}}
{{- if .clientKeys.secret }}
- --client-keys=/client-keys/keys.jsonl
{{- end }}
{{- end }}

{{/* A whole folder, not a file of it: the kubelet does not renew the latter. */}}
{{- define "lockstep.keysMount" -}}
{{- if .clientKeys.secret }}
- {name: client-keys, mountPath: /client-keys, readOnly: true}
{{- end }}
{{- end }}

{{- define "lockstep.keysVolume" -}}
{{- if .clientKeys.secret }}
- name: client-keys
  secret:
    secretName: {{ .clientKeys.secret | quote }}
    defaultMode: 0440
    items: [{key: keys.jsonl, path: keys.jsonl}]
{{- end }}
{{- end }}
