{{/* The secret with a role's certificate: (list CELL ROLE). */}}
{{- define "lockstep.tlsSecret" -}}
{{- $cell := index . 0 }}{{ $role := index . 1 }}
{{- get $cell.tls.secrets $role | default (printf "%s-%s-tls" $cell.prefix $role) }}
{{- end }}

{{/* Flags of a service: (list CELL PORT). */}}
{{- define "lockstep.listenFlags" -}}
{{- $cell := index . 0 }}{{ $port := index . 1 }}
{{- if $cell.tls.insecure }}
- --insecure-bind={{ $cell.anyHost }}:{{ $port }}
{{- else }}
- --listen={{ $cell.anyHost }}:{{ $port }}
- --tls-cert=/tls/tls.crt
- --tls-key=/tls/tls.key
- --tls-ca=/tls/ca.crt
- --trust-domain={{ $cell.trustDomain }}
{{- end }}
{{- end }}

{{- define "lockstep.tlsMount" -}}
{{- if not .tls.insecure }}
- {name: tls, mountPath: /tls, readOnly: true}
{{- end }}
{{- end }}

{{/* (list CELL ROLE) */}}
{{- define "lockstep.tlsVolume" -}}
{{- if not (index . 0).tls.insecure }}
- name: tls
  secret:
    secretName: {{ include "lockstep.tlsSecret" . | quote }}
    defaultMode: 0440
{{- end }}
{{- end }}
