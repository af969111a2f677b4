{{/* What clients need: keys, and certificates. Flags of a service: CELL. */}}
{{- define "lockstep.clientFlags" -}}
{{- if .clientKeys.secret }}
- --client-keys=/client-keys/keys.jsonl
{{- end }}
{{- if .clientCa.secret }}
- --client-ca=/client-ca/ca.crt
{{- end }}
{{- end }}

{{/* Whole folders, not files of them: the kubelet does not renew the latter. */}}
{{- define "lockstep.clientMounts" -}}
{{- if .clientKeys.secret }}
- {name: client-keys, mountPath: /client-keys, readOnly: true}
{{- end }}
{{- if .clientCa.secret }}
- {name: client-ca, mountPath: /client-ca, readOnly: true}
{{- end }}
{{- end }}

{{- define "lockstep.clientVolumes" -}}
{{- if .clientKeys.secret }}
- name: client-keys
  secret:
    secretName: {{ .clientKeys.secret | quote }}
    defaultMode: 0440
    items: [{key: keys.jsonl, path: keys.jsonl}]
{{- end }}
{{- if .clientCa.secret }}
- name: client-ca
  secret:
    secretName: {{ .clientCa.secret | quote }}
    defaultMode: 0440
    # No key, even if it is there.
    items: [{key: ca.crt, path: ca.crt}]
{{- end }}
{{- end }}
