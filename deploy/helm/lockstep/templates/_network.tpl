{{/* A peer: the pods of a cell's component. (list ROOT CELL COMPONENT) */}}
{{- define "lockstep.component" -}}
- podSelector:
    matchLabels:
      {{- include "lockstep.selector" . | nindent 6 }}
{{- end }}

{{/* Lets PEERS in: (list ROOT CELL COMPONENT NAME PEERS LIST_OF_PORTS). */}}
{{- define "lockstep.ingress" }}
---
{{ include "lockstep.policyHead" . }}
  policyTypes: [Ingress]
  ingress:
    - from: {{ toJson (index . 4) }}
      {{- include "lockstep.policyPorts" (index . 5) | nindent 6 }}
{{- end }}

{{/* Lets pods out to PEERS: (list ROOT CELL COMPONENT NAME PEERS LIST_OF_PORTS). */}}
{{- define "lockstep.egress" }}
---
{{ include "lockstep.policyHead" . }}
  policyTypes: [Egress]
  egress:
    - to: {{ toJson (index . 4) }}
      {{- include "lockstep.policyPorts" (index . 5) | nindent 6 }}
{{- end }}

{{- define "lockstep.policyPorts" -}}
ports:
  {{- range . }}
  - {{ toJson (merge (dict "protocol" "TCP") .) }}
  {{- end }}
{{- end }}

{{- define "lockstep.policyHead" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ (index . 1).prefix }}-{{ index . 2 }}-{{ index . 3 }}
  labels:
    {{- include "lockstep.labels" (list (index . 0) (index . 1) (index . 2)) | nindent 4 }}
spec:
  podSelector:
    matchLabels:
      {{- include "lockstep.selector" (list (index . 0) (index . 1) (index . 2)) | nindent 6 }}
{{- end }}

{{/* The families of a Service's addresses; the cluster's default if none are given. */}}
{{- define "lockstep.families" -}}
{{- with .Values.ipFamilies }}
ipFamilyPolicy: {{ ternary "RequireDualStack" "SingleStack" (gt (len .) 1) }}
ipFamilies: {{ toJson . }}
{{- end }}
{{- end }}
